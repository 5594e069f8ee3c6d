// RocketMQ's mqadmin (MQAdminStartup of rocketmq-tools), unmodified: performs the command lines of a file, one a line
// with tabs between its words, and prints one JSON object a line, {"line": TEXT, "out": TEXT, "err": TEXT}. Lines with @
// are the peer's own: @commands names what mqadmin knows, @route TOPIC waits until the topic has a route, @clients
// starts a producer and a consumer that have sent and read ten messages, @stop ends both. The clients' values
// replace {offset_id}, {unique_id}, {client_id} in later lines.

import java.io.ByteArrayOutputStream;
import java.io.PrintStream;
import java.lang.reflect.Field;
import java.nio.file.Files;
import java.nio.file.Paths;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.tools.command.MQAdminStartup;
import org.apache.rocketmq.tools.command.SubCommand;

public class MqadminPeer {
    static final long DEADLINE_MS = 60000;
    static final PrintStream out = System.out;
    static final Map<String, String> known = new TreeMap<>();
    static String nameServer;
    static DefaultMQProducer producer;
    static DefaultMQPushConsumer consumer;

    static String quoted(String value) {
        StringBuilder text = new StringBuilder();
        for (char each : value.toCharArray()) {
            text.append(each < ' ' || each == '"' || each == '\\' ? String.format("\\u%04x", (int) each) : "" + each);
        }
        return "\"" + text + "\"";
    }

    static void tell(String line, String said, String failed) {
        out.println("{\"line\":" + quoted(line) + ",\"out\":" + quoted(said) + ",\"err\":" + quoted(failed) + "}");
    }

    @SuppressWarnings("unchecked")
    static String commands() throws Exception {
        MQAdminStartup.initCommand();
        Field field = MQAdminStartup.class.getDeclaredField("subCommandList");
        field.setAccessible(true);
        List<String> names = new ArrayList<>();
        ((List<SubCommand>) field.get(null)).forEach(each -> names.add(each.commandName()));
        return String.join(" ", names);
    }

    static DefaultMQProducer started(String group) throws Exception {
        DefaultMQProducer made = new DefaultMQProducer(group);
        made.setNamesrvAddr(nameServer);
        made.setInstanceName(group);
        made.start();
        return made;
    }

    static void awaitRoute(String topic) throws Exception {
        DefaultMQProducer asking = started("asking");
        long end = System.currentTimeMillis() + DEADLINE_MS;
        while (true) {
            try {
                asking.fetchPublishMessageQueues(topic);
                break;
            } catch (Exception error) {
                if (System.currentTimeMillis() > end) {
                    throw error;
                }
                Thread.sleep(100);
            }
        }
        asking.shutdown();
    }

    static void startClients() throws Exception {
        AtomicInteger read = new AtomicInteger();
        consumer = new DefaultMQPushConsumer("readers");
        consumer.setNamesrvAddr(nameServer);
        consumer.setInstanceName("reading");
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe("tooled", "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            read.addAndGet(messages.size());
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        producer = started("writers");
        List<MessageQueue> queues = producer.fetchPublishMessageQueues("tooled");
        queues.sort(null);
        for (int number = 0; number < 10; number++) {
            Message message = new Message("tooled", "tag-" + number % 2, "key-" + number, ("body-" + number).getBytes());
            SendResult sent = producer.send(message, queues.get(number % queues.size()));
            if (number == 0) {
                known.put("{offset_id}", sent.getOffsetMsgId());
                known.put("{unique_id}", sent.getMsgId());
            }
        }
        long end = System.currentTimeMillis() + DEADLINE_MS;
        while (read.get() < 10 && System.currentTimeMillis() < end) {
            Thread.sleep(10);
        }
        known.put("{client_id}", consumer.buildMQClientId());
        consumer.getDefaultMQPushConsumerImpl().getmQClientFactory().sendHeartbeatToAllBrokerWithLock();
        producer.getDefaultMQProducerImpl().getmQClientFactory().sendHeartbeatToAllBrokerWithLock();
        consumer.getDefaultMQPushConsumerImpl().persistConsumerOffset();
        Thread.sleep(300);  // offsets are committed by oneway requests
    }

    static String own(String[] words) throws Exception {
        switch (words[0]) {
            case "@commands":
                return commands();
            case "@route":
                awaitRoute(words[1]);
                return "";
            case "@clients":
                startClients();
                return "";
            case "@stop":
                consumer.shutdown();
                producer.shutdown();
                return "";
            default:
                throw new IllegalArgumentException(words[0]);
        }
    }

    static void perform(String line) throws Exception {
        String[] words = line.split("\t");
        if (words[0].startsWith("@")) {
            tell(line, own(words), "");
            return;
        }
        for (int at = 0; at < words.length; at++) {
            for (Map.Entry<String, String> each : known.entrySet()) {
                words[at] = words[at].replace(each.getKey(), each.getValue());
            }
        }
        ByteArrayOutputStream said = new ByteArrayOutputStream();
        ByteArrayOutputStream failed = new ByteArrayOutputStream();
        PrintStream before = System.err;
        System.setOut(new PrintStream(said, true));
        System.setErr(new PrintStream(failed, true));
        try {
            MQAdminStartup.main0(words, null);
        } finally {
            System.setOut(out);
            System.setErr(before);
        }
        tell(line, said.toString(), failed.toString());
    }

    public static void main(String[] arguments) throws Exception {
        nameServer = arguments[0];
        System.setProperty("rocketmq.namesrv.addr", nameServer);
        for (String line : Files.readAllLines(Paths.get(arguments[1]))) {
            perform(line);
        }
        System.exit(0);
    }
}
