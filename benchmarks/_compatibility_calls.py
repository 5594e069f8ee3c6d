"""The calls made to both brokers, what is noise in their answers, and why our answers differ from Apache's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks._compatibility_guests import BROKER_NAME, CLUSTER, Side

__all__ = ["EXPLANATIONS", "NOT_RUN", "Explanation", "mqadmin_lines", "normal_lines"]

MQADMIN = """
updateTopic -b {broker} -t tooled -r 3 -w 2
updateTopic -c {cluster} -t made -r 2 -w 2 -o true
updateTopicPerm -b {broker} -t made -p 4
updateTopicPerm -b {broker} -t nowhere -p 4
updateSubGroup -b {broker} -g readers -r 3
@route tooled
@clients
topicRoute -t tooled
topicRoute -t tooled -l
topicRoute -t nowhere
topicStatus -t tooled
topicStatus -t nowhere
topicClusterList -t tooled
topicList
topicList -c
clusterList
clusterList -m
brokerStatus -b {broker}
queryMsgById -i {offset_id}
queryMsgById -i {offset_id} -g readers -d {client_id}
queryMsgByKey -t tooled -k key-3
queryMsgByKey -t tooled -k key-none
queryMsgByUniqueKey -t tooled -i {unique_id}
queryMsgByUniqueKey -t tooled -i {unique_id} -a
queryMsgByOffset -b {name} -t tooled -i 0 -o 0
queryMsgByOffset -b {name} -t tooled -i 0 -o 99
queryMsgTraceById -i {unique_id}
printMsg -t tooled -d true
printMsg -t tooled -s tag-1
printMsgByQueue -t tooled -a {name} -i 0 -p true -f true
sendMsgStatus -b {name} -s 128 -c 3
brokerConsumeStats -b {broker}
producerConnection -g writers -t tooled
producer -b {broker}
consumerConnection -g readers
consumerConnection -g nobody
consumerProgress
consumerProgress -g readers
consumerProgress -g readers -s true
consumerProgress -g nobody
consumerStatus -g readers
consumerStatus -g readers -i {client_id}
getConsumerConfig -g readers
getConsumerConfig -g nobody
queryCq -t tooled -q 0 -i 0 -b {broker}
queryCq -t tooled -q 0 -i 0 -b {broker} -g readers
sendMessage -t tooled -p more -k more-key -c tag-1 -b {name} -i 0
sendMessage -t nowhere -p more
consumeMessage -t tooled -b {name} -i 0 -o 0 -c 3
checkMsgSendRT -t tooled -a 3 -s 16
cloneGroupOffset -s readers -d copied -t tooled -o true
resetOffsetByTime -g readers -t tooled -s 0
skipAccumulatedMessage -g readers -t tooled
allocateMQ -t tooled -i 10.0.0.1,10.0.0.2
statsAll -t tooled
getNamesrvConfig
updateNamesrvConfig -k clusterTest -v true
getBrokerConfig -b {broker}
updateBrokerConfig -b {broker} -k transactionCheckMax -v 14
updateBrokerConfig -b {broker} -k noSuchSetting -v 14
updateKvConfig -s space -k key -v value
deleteKvConfig -s space -k key
updateOrderConf -m put -t made -v {name}:2
updateOrderConf -m get -t made
updateOrderConf -m delete -t made
updateOrderConf -m get -t made
wipeWritePerm -b {name}
topicRoute -t tooled
addWritePerm -b {name}
topicRoute -t tooled
wipeWritePerm -b nobody
cleanExpiredCQ -b {broker}
cleanUnusedTopic -b {broker}
deleteExpiredCommitLog -b {broker}
updateAclConfig -b {broker} -a account1 -s secret123
deleteAclConfig -b {broker} -a account1
clusterAclConfigVersion -b {broker}
updateGlobalWhiteAddr -b {broker} -g 10.0.0.1
exportMetadata -c {cluster} -f {files}
exportConfigs -c {cluster} -f {files}
exportMetrics -c {cluster} -f {files}
@stop
resetOffsetByTime -g readers -t tooled -s 0
skipAccumulatedMessage -g readers -t tooled
consumerConnection -g readers
consumerProgress -g readers
deleteSubGroup -b {broker} -g readers -r true
deleteSubGroup -b {broker} -g nobody
deleteTopic -c {cluster} -t made
topicRoute -t made
"""
"""Command lines of mqadmin and of the peer that runs them (tests/node/interop/java/MqadminPeer.java)."""

NOT_RUN = {
    "startMonitoring": "a program that monitors forever",
    "clusterRT": "sends forever; `checkMsgSendRT` sends a given number of times",
}


def mqadmin_lines(side: Side) -> list[list[str]]:
    """The command lines for a side, split into words; placeholders not known here are replaced by the peer."""
    known = {"broker": side.broker, "name": BROKER_NAME, "cluster": CLUSTER, "files": str(side.directory / "files")}
    lines = []
    for line in MQADMIN.strip().splitlines():
        for name, value in known.items():
            line = line.replace(f"{{{name}}}", value)
        lines.append(line.split())
    return lines


NOISE: Sequence[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), word)
    for pattern, word in (
        (r"\n\s*(?:at |\.\.\. \d+ more).*", ""),
        (r"(?:See|For more information, please visit the url,) http\S+(?: for further details\.)?", ""),
        (r"/?\b(?:\d+\.){3}\d+:\d+", "ADDRESS"),
        (r"\b(?:\d+\.){3}\d+", "IP"),
        (r"\d{4}-\d\d-\d\d[ ,T#]\d\d:\d\d:\d\d(?:[:,.]\d+)?", "TIME"),
        (r"\b20\d{12,15}\b", "TIME"),
        (r"\b1\d{12}\b", "TIME"),
        (r"\b[0-9A-F]{32,}\b", "ID"),
        (r"(?:@[0-9a-f]{6,8}|\$\$Lambda\S*)", ""),
        (r"\b\d+(?:\.\d+)+\b%?", "RATE"),
        (r"(?<=rt=)\d+ms", "RATE"),
        (r"(?<=spentTimeMills=)\d+", "RATE"),
        (r"\b(true|false)[ \t]+\d+(?=\n)", r"\1 RATE"),
        (r"\b(listenPort\s*[=:]\s*\"?)\d+", r"\1PORT"),
        (r"\b(level-\d: )\d{4}\b", r"\1TIME"),
        (r"\b(tagsCode\"?[:=] ?)\d+", r"\1HASH"),
        (r"\S*/(?:apache|ours)/[\w./-]*", "PATH"),
        (r".*\bCLIENT_INNER_PRODUCER\b.*", ""),
        (r"%RETRY%readers/.*", ""),
        (r"(checked\.[^:]*: )\d+", r"\1COUNT"),
        (r"[ \t]+", " "),
    )
]
"""What varies between runs of the same broker: addresses, times, identities, rates, width of columns, internal
producers of clients (which appear with their next heartbeat), the queue of a retry topic (which its consumer finds when
it next polls routes), and how often a transaction was checked."""


def normal_lines(text: str) -> tuple[str, ...]:
    """The lines of an answer without noise, sorted, as tools print tables in hash order."""
    for pattern, word in NOISE:
        text = pattern.sub(word, text)
    return tuple(sorted(line.strip() for line in text.splitlines() if line.strip()))


class Explanation(NamedTuple):
    """Why answer lines that match `line` may be in only one broker's answer, for calls that match `call`; both are
    regular expressions, used with `re.search`."""

    call: str
    line: str
    reason: str


_OWN_WORDS = "the same code, another message"
_BY_ITSELF = "no manual cleanup is needed: files expire by age and space, and with them the queues of a deleted topic"
_ACCOUNTS = "accounts are part of the configuration; Apache ran without access control, and fails with a null pointer"
_PROPERTIES = (
    "Apache drops the property WAIT=true and adds CLUSTER to every message; here properties stay as sent, and CLUSTER "
    "is added only if a reply needs it. Sizes and log positions differ accordingly"
)
_TODAY = "there are no daily counters (such as msgPutTotalTodayMorning); `/metrics` has totals"

EXPLANATIONS: Sequence[Explanation] = [
    Explanation("", r"CODE: 17 DESC: (No topic route|no broker has)", _OWN_WORDS),
    Explanation("", r"CODE: 206 DESC: (the consumer group|no consumer of group)", _OWN_WORDS),
    Explanation("", r"CODE: 22 DESC: (No config item|no value for)", _OWN_WORDS),
    Explanation("sql92", r"wrong: .*CODE: 23 ", _OWN_WORDS),
    Explanation(
        "topicStatus|examineTopicStats",
        r"broker-a.2",
        "a queue that is readable but no longer writable is listed too: it may hold messages",
    ),
    Explanation(
        "topicList|exportMetadata|fetchAllTopicList|fetchTopicsByCLuster|getAllTopicConfig",
        "BenchmarkTest|OFFSET_MOVED_EVENT|RMQ_SYS_TRANS_HALF_TOPIC|SCHEDULE_TOPIC_XXXX|SELF_TEST_TOPIC"
        "|TRANS_CHECK_MAX_TIME_TOPIC",
        "internal topics are not listed to clients, and unneeded ones are not created; the one for transactions that "
        "were given up exists from the start",
    ),
    Explanation(
        "(wipe|add)WritePerm", r"OK, \d+|^\d+$", "the number of topics: Apache's broker has more internal ones"
    ),
    Explanation("clusterList", r"^splitbrain broker-a 0 ADDRESS", "the version, and the age of the oldest message"),
    Explanation("clusterList -m", r"^splitbrain broker-a 0 ", _TODAY),
    Explanation(
        "brokerStatus|fetchBrokerRuntimeStats",
        "",
        "shared statistics have the same name; only Apache's has thread pools and page cache locks, only this one has "
        "terms, roles and the dispatcher",
    ),
    Explanation("queryMsg|[pP]rintMsg|consumeMessage|queryCq", "WAIT=true|CLUSTER=|Size=", _PROPERTIES),
    Explanation(
        "queryCq|queryConsumeQueue",
        "eval\\b",
        "here `eval` says whether a message matches the group's subscription; Apache returned false for messages that "
        "the group had read",
    ),
    Explanation(
        "queryCq|queryConsumeQueue",
        "Filter data:|^null$|^=+$|filterData",
        "Apache reports its Bloom filter, which has no counterpart here",
    ),
    Explanation(
        "statsAll|viewBrokerStatsData", "^tooled |CODE: |^RATE|stats", "statistics by name (code 315) are in `/metrics`"
    ),
    Explanation("getNamesrvConfig|getNameServerConfig", "", "the settings that this name server has"),
    Explanation("updateNamesrvConfig", "", "code 318 is not served: a name server's settings are command-line options"),
    Explanation("getBrokerConfig", "", "the settings that have a counterpart here, by RocketMQ's names"),
    Explanation(
        "updateBrokerConfig",
        "noSuchSetting|update broker config|command failed",
        "an unknown setting is refused; Apache keeps it and reports success",
    ),
    Explanation("cleanExpired|cleanUnused|deleteExpired", "", _BY_ITSELF),
    Explanation("AclConfig|updateGlobalWhiteAddr|AclVersion", "", _ACCOUNTS),
    Explanation("exportMetrics", "", _TODAY),
    Explanation(
        "getAllSubscriptionGroup|exportMetadata",
        "CID_|readers",
        "Alibaba's own groups, which Apache's broker creates",
    ),
    Explanation(
        "getAllTopicConfig", "RMQ_SYS_TRANS_OP_HALF_TOPIC", "exists from the start; Apache creates it when it is needed"
    ),
    Explanation(
        "resumeCheckHalfMessage", "", "code 323 is not served; Apache returned true for a message of no transaction"
    ),
    Explanation("resetOffsetByTimestamp without", "CODE: 206 DESC", _OWN_WORDS),
    Explanation(
        "Java client 5.*: lite pull",
        "",
        "this client's pull consumers use code 361, which is answered here as a pull; Apache's 4.9 does not know it",
    ),
]
