// RocketMQ's own Java client of version 5, unmodified: a push consumer in POP mode, and timer messages. Prints one JSON
// object a line, {"step": NAME, "result": ...} or {"step": NAME, "error": TEXT}.

import java.nio.charset.StandardCharsets;
import java.util.Map;
import java.util.TreeSet;
import java.util.Set;
import java.util.concurrent.Callable;
import java.util.concurrent.ConcurrentHashMap;
import java.util.function.Consumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageRequestMode;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

public class PopPeer {
    static final long DEADLINE_MS = 90000;
    static final int PATIENCE_MS = 30000;
    static final Map<String, Long> DUE_MS = new ConcurrentHashMap<>();
    static String nameServer;
    static String broker;

    static void step(String name, Callable<Object> what) {
        String kind = "result";
        String text;
        try {
            text = String.valueOf(what.call());
        } catch (Throwable error) {
            kind = "error";
            text = String.valueOf(error.getMessage());
        }
        text = text.replace("\\", "\\\\").replace("\"", "\\\"").replace("\n", " ");
        System.out.println("{\"step\":\"" + name + "\",\"" + kind + "\":\"" + text + "\"}");
    }

    static Message message(String topic, String body) {
        return new Message(topic, "a", "key", body.getBytes(StandardCharsets.UTF_8));
    }

    static Object pops(String topic, String group, int share) throws Exception {
        DefaultMQAdminExt admin = new DefaultMQAdminExt(PATIENCE_MS);
        admin.setNamesrvAddr(nameServer);
        admin.setInstanceName("admin-" + topic);
        admin.start();
        admin.setMessageRequestMode(broker, topic, group, MessageRequestMode.POP, share, PATIENCE_MS);
        admin.shutdown();
        return "set";
    }

    static Object consumed(String topic, String group, int count) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group);
        consumer.setNamesrvAddr(nameServer);
        consumer.setInstanceName(group);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setClientRebalance(false);
        consumer.setMqClientApiTimeout(PATIENCE_MS);
        consumer.subscribe(topic, "*");
        Set<String> came = ConcurrentHashMap.newKeySet();
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            boolean fails = false;
            for (MessageExt each : messages) {
                String body = new String(each.getBody(), StandardCharsets.UTF_8);
                long due = DUE_MS.getOrDefault(body, 0L);
                came.add(body + " again " + each.getReconsumeTimes() + " of " + each.getTopic()
                    + (System.currentTimeMillis() < due ? " early" : ""));
                fails |= body.equals("difficult") && each.getReconsumeTimes() == 0;
            }
            return fails ? ConsumeConcurrentlyStatus.RECONSUME_LATER : ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        long end = System.currentTimeMillis() + DEADLINE_MS;
        while (came.size() < count && System.currentTimeMillis() < end) {
            Thread.sleep(20);
        }
        Thread.sleep(500);  // an unwanted message would have arrived by now
        consumer.shutdown();
        return new TreeSet<>(came);
    }

    static Object timed(DefaultMQProducer producer, String body, long delayMs, Consumer<Message> asks) throws Exception {
        Message message = message("timed", body);
        DUE_MS.put(body, System.currentTimeMillis() + delayMs);
        asks.accept(message);
        return producer.send(message).getSendStatus();
    }

    public static void main(String[] arguments) throws Exception {
        nameServer = arguments[0];
        broker = arguments[1];
        DefaultMQProducer producer = new DefaultMQProducer("writers");
        producer.setNamesrvAddr(nameServer);
        producer.setSendMsgTimeout(PATIENCE_MS);
        producer.setMqClientApiTimeout(PATIENCE_MS);
        producer.start();
        step("send for a time after 2 s", () -> timed(producer, "two", 2000, each -> each.setDelayTimeSec(2)));
        step("send for a time after 1500 ms", () -> timed(producer, "one", 1500, each -> each.setDelayTimeMs(1500)));
        step("send for a time of the clock", () -> timed(producer, "three", 3000,
            each -> each.setDeliverTimeMs(DUE_MS.get("three"))));
        step("send for a time that is over", () -> timed(producer, "zero", 0,
            each -> each.setDeliverTimeMs(System.currentTimeMillis() - 5000)));
        step("send for a time too far away", () -> timed(producer, "never", 0, each -> each.setDelayTimeSec(300000)));
        step("set POP for all queues", () -> pops("popped", "poppers", 0));
        step("set POP for shares", () -> pops("timed", "sharers", 1));
        step("send", () -> {
            for (int number = 0; number < 20; number++) {
                producer.send(message("popped", "number " + number));
            }
            return producer.send(message("popped", "difficult")).getSendStatus();
        });
        step("consume, one message given back", () -> consumed("popped", "poppers", 22));
        step("consume nothing again", () -> consumed("popped", "poppers", 0));
        step("consume what was sent for a time", () -> consumed("timed", "sharers", 4));
        producer.shutdown();
        System.exit(0);
    }
}
