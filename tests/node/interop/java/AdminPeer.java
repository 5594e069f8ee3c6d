// The tools' half of RocketMQ's own Java client (rocketmq-tools), unmodified: calls DefaultMQAdminExt one after the
// other as mqadmin does and prints one JSON object a line, {"call": NAME, "result": TEXT} or {"call": NAME, "error": TEXT}.

import com.alibaba.fastjson.JSON;
import com.alibaba.fastjson.serializer.SerializerFeature;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.concurrent.Callable;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageClientIDSetter;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.common.subscription.SubscriptionGroupConfig;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

public class AdminPeer {
    static final Map<String, Object> told = new LinkedHashMap<>();

    static <T> T call(String name, Callable<T> what) {
        Map<String, Object> line = new LinkedHashMap<>();
        line.put("call", name);
        T result = null;
        try {
            result = what.call();
            line.put("result", result == null ? null : shown(result));
        } catch (Throwable error) {
            line.put("error", String.valueOf(error));
        }
        System.out.println(JSON.toJSONString(line, SerializerFeature.WriteNonStringKeyAsString));
        return result;
    }

    interface Act {
        void run() throws Exception;
    }

    static void act(String name, Act what) {
        call(name, () -> {
            what.run();
            return "done";
        });
    }

    // Maps with objects as keys are no JSON: the keys are printed as text.
    static Object shown(Object value) {
        if (value instanceof Map) {
            Map<String, Object> result = new TreeMap<>();
            ((Map<?, ?>) value).forEach((key, each) -> result.put(place(key), shown(each)));
            return result;
        }
        return value instanceof TreeSet || value instanceof Number || value instanceof Boolean ? value : value;
    }

    static String place(Object key) {
        if (key instanceof MessageQueue) {
            MessageQueue queue = (MessageQueue) key;
            return queue.getTopic() + "/" + queue.getBrokerName() + "/" + queue.getQueueId();
        }
        return String.valueOf(key);
    }

    public static void main(String[] arguments) throws Exception {
        String nameServer = arguments[0];
        String broker = arguments[1];
        System.setProperty("rocketmq.client.logUseSlf4j", "true");
        DefaultMQAdminExt admin = new DefaultMQAdminExt(30000);
        admin.setNamesrvAddr(nameServer);
        admin.setInstanceName("tools");
        admin.start();

        Set<String> both = new HashSet<>();
        Collections.addAll(both, broker);
        TopicConfig topic = new TopicConfig("tooled", 3, 2, 6);
        act("createAndUpdateTopicConfig", () -> admin.createAndUpdateTopicConfig(broker, topic));
        act("createTopic", () -> admin.createTopic("TBW102", "made", 2));
        SubscriptionGroupConfig group = new SubscriptionGroupConfig();
        group.setGroupName("readers");
        group.setRetryMaxTimes(3);
        act("createAndUpdateSubscriptionGroupConfig", () -> admin.createAndUpdateSubscriptionGroupConfig(broker, group));
        call("examineSubscriptionGroupConfig", () -> admin.examineSubscriptionGroupConfig(broker, "readers"));
        call("examineTopicConfig", () -> admin.examineTopicConfig(broker, "tooled"));
        Thread.sleep(Long.parseLong(arguments[2]));
        call("examineTopicRouteInfo", () -> admin.examineTopicRouteInfo("tooled"));
        call("fetchAllTopicList", () -> new TreeSet<>(admin.fetchAllTopicList().getTopicList()));
        call("fetchTopicsByCLuster", () -> new TreeSet<>(admin.fetchTopicsByCLuster("splitbrain").getTopicList()));
        call("examineBrokerClusterInfo", () -> admin.examineBrokerClusterInfo());
        call("getClusterList", () -> admin.getClusterList("tooled"));
        call("getTopicClusterList", () -> admin.getTopicClusterList("tooled"));
        call("fetchBrokerRuntimeStats", () -> admin.fetchBrokerRuntimeStats(broker).getTable());

        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("readers");
        consumer.setNamesrvAddr(nameServer);
        consumer.setInstanceName("reading");
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe("tooled", "*");
        List<MessageExt> read = Collections.synchronizedList(new ArrayList<>());
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            read.addAll(messages);
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        DefaultMQProducer producer = new DefaultMQProducer("writers");
        producer.setNamesrvAddr(nameServer);
        producer.setInstanceName("writing");
        producer.start();
        List<SendResult> sent = new ArrayList<>();
        for (int number = 0; number < 10; number++) {
            Message message = new Message("tooled", "tag-" + number % 2, "key-" + number, ("body-" + number).getBytes());
            sent.add(producer.send(message));
        }
        while (read.size() < 10) {
            Thread.sleep(10);
        }
        consumer.getDefaultMQPushConsumerImpl().getmQClientFactory().sendHeartbeatToAllBrokerWithLock();
        producer.getDefaultMQProducerImpl().getmQClientFactory().sendHeartbeatToAllBrokerWithLock();
        consumer.getDefaultMQPushConsumerImpl().persistConsumerOffset();
        Thread.sleep(300);  // offsets are committed by oneway requests

        call("examineTopicStats", () -> admin.examineTopicStats("tooled").getOffsetTable());
        call("examineConsumeStats", () -> admin.examineConsumeStats("readers").getOffsetTable());
        call("examineConsumeStats of a topic", () -> admin.examineConsumeStats("readers", "tooled").getOffsetTable());
        call("examineConsumerConnectionInfo", () -> admin.examineConsumerConnectionInfo("readers"));
        call("examineConsumerConnectionInfo at a broker", () -> admin.examineConsumerConnectionInfo("readers", broker));
        call("examineProducerConnectionInfo", () -> admin.examineProducerConnectionInfo("writers", "tooled"));
        call("getAllProducerInfo", () -> admin.getAllProducerInfo(broker).getData());
        call("queryTopicConsumeByWho", () -> admin.queryTopicConsumeByWho("tooled").getGroupList());
        call("queryConsumeTimeSpan", () -> admin.queryConsumeTimeSpan("tooled", "readers"));
        call("fetchConsumeStatsInBroker", () -> admin.fetchConsumeStatsInBroker(broker, false, 5000).getBrokerAddr());
        String clientId = consumer.buildMQClientId();
        call("getConsumerRunningInfo", () -> admin.getConsumerRunningInfo("readers", clientId, false).getSubscriptionSet());
        call("getConsumeStatus", () -> admin.getConsumeStatus("tooled", "readers", ""));

        MessageExt first = read.get(0);
        call("viewMessage by offset id", () -> new String(admin.viewMessage(sent.get(0).getOffsetMsgId()).getBody()));
        call("viewMessage by unique id", () -> new String(admin.viewMessage("tooled", sent.get(1).getMsgId()).getBody()));
        call("queryMessage", () -> new String(
            admin.queryMessage("tooled", "key-3", 32, 0, Long.MAX_VALUE).getMessageList().get(0).getBody()));
        call("queryMessageByUniqKey", () -> new String(admin.queryMessageByUniqKey(
            "tooled", sent.get(4).getMsgId(), 32, 0, Long.MAX_VALUE).getMessageList().get(0).getBody()));
        call("messageTrackDetail", () -> admin.messageTrackDetail(first));
        call("consumeMessageDirectly", () -> admin.consumeMessageDirectly(
            "readers", clientId, "tooled", sent.get(5).getMsgId()).getConsumeResult());
        MessageQueue queue = sent.get(0).getMessageQueue();
        call("maxOffset", () -> admin.maxOffset(queue));
        call("minOffset", () -> admin.minOffset(queue));
        call("searchOffset", () -> admin.searchOffset(queue, 0));
        call("earliestMsgStoreTime", () -> admin.earliestMsgStoreTime(queue));
        call("queryConsumeQueue", () -> admin.queryConsumeQueue(broker, "tooled", 0, 0, 10, "readers"));
        call("getAllTopicConfig", () -> new TreeSet<>(admin.getAllTopicConfig(broker, 5000).getTopicConfigTable().keySet()));
        call("getUserTopicConfig", () -> new TreeSet<>(
            admin.getUserTopicConfig(broker, false, 5000).getTopicConfigTable().keySet()));
        call("getAllSubscriptionGroup", () -> new TreeSet<>(
            admin.getAllSubscriptionGroup(broker, 5000).getSubscriptionGroupTable().keySet()));
        call("getUserSubscriptionGroup", () -> new TreeSet<>(
            admin.getUserSubscriptionGroup(broker, 5000).getSubscriptionGroupTable().keySet()));
        call("viewBrokerStatsData", () -> admin.viewBrokerStatsData(broker, "TOPIC_PUT_NUMS", "tooled"));

        int before = read.size();
        call("resetOffsetByTimestamp", () -> admin.resetOffsetByTimestamp("tooled", "readers", 0, true));
        call("messages read again", () -> {
            long deadline = System.currentTimeMillis() + 30000;
            while (read.size() < before + 10 && System.currentTimeMillis() < deadline) {
                Thread.sleep(10);
            }
            return read.size() - before;
        });
        act("updateConsumeOffset", () -> admin.updateConsumeOffset(broker, "others", queue, 1));
        act("cloneGroupOffset", () -> admin.cloneGroupOffset("readers", "copied", "tooled", true));
        consumer.shutdown();
        producer.shutdown();
        call("resetOffsetByTimestamp without consumers",
            () -> admin.resetOffsetByTimestamp("tooled", "readers", 0, true));
        call("resetOffsetByTimestampOld", () -> admin.resetOffsetByTimestampOld("readers", "tooled", 0, true).size());
        call("examineConsumerConnectionInfo of nobody", () -> admin.examineConsumerConnectionInfo("readers"));

        call("getBrokerConfig", () -> admin.getBrokerConfig(broker));
        call("getNameServerConfig", () -> admin.getNameServerConfig(null));
        act("updateBrokerConfig", () -> {
            Properties changes = new Properties();
            changes.setProperty("transactionCheckMax", "14");
            admin.updateBrokerConfig(broker, changes);
        });
        call("cleanExpiredConsumerQueueByAddr", () -> admin.cleanExpiredConsumerQueueByAddr(broker));
        call("deleteExpiredCommitLogByAddr", () -> admin.deleteExpiredCommitLogByAddr(broker));
        call("cleanUnusedTopicByAddr", () -> admin.cleanUnusedTopicByAddr(broker));
        call("wipeWritePermOfBroker", () -> admin.wipeWritePermOfBroker(nameServer, "broker-a"));
        call("addWritePermOfBroker", () -> admin.addWritePermOfBroker(nameServer, "broker-a"));
        act("createAndUpdateKvConfig", () -> admin.createAndUpdateKvConfig("space", "key", "value"));
        call("getKVConfig", () -> admin.getKVConfig("space", "key"));
        call("getKVListByNamespace", () -> admin.getKVListByNamespace("space").getTable());
        act("deleteKvConfig", () -> admin.deleteKvConfig("space", "key"));
        act("createOrUpdateOrderConf", () -> admin.createOrUpdateOrderConf("tooled", "broker-a:2", false));
        act("deleteSubscriptionGroup", () -> admin.deleteSubscriptionGroup(broker, "readers", true));
        act("deleteTopicInBroker", () -> admin.deleteTopicInBroker(both, "made"));
        act("deleteTopicInNameServer", () -> admin.deleteTopicInNameServer(
            new HashSet<>(Arrays.asList(nameServer)), "made", "splitbrain"));
        call("resumeCheckHalfMessage", () -> admin.resumeCheckHalfMessage(sent.get(0).getOffsetMsgId()));
        call("examineBrokerClusterAclVersionInfo", () -> admin.examineBrokerClusterAclVersionInfo(broker));
        admin.shutdown();
        System.exit(0);
    }
}
