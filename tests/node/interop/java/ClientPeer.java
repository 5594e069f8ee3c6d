// RocketMQ's own Java client, unmodified, doing what applications do with it. Prints one JSON object a line,
// {"step": NAME, "result": ...} or {"step": NAME, "error": TEXT}.

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Collection;
import java.util.Collections;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.concurrent.Callable;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.function.BooleanSupplier;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.RequestCallback;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.client.utils.MessageUtil;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.common.protocol.heartbeat.MessageModel;
import org.apache.rocketmq.remoting.common.RemotingHelper;

public class ClientPeer {
    static final long DEADLINE_MS = 60000;
    static final int PATIENCE_MS = 30000;  // the machine may be busy with other tests
    static String nameServer;

    static String quoted(Object value) {
        if (value == null || value instanceof Number || value instanceof Boolean) {
            return String.valueOf(value);
        }
        StringBuilder text = new StringBuilder();
        if (value instanceof Collection) {
            for (Object each : (Collection<?>) value) {
                text.append(text.length() == 0 ? "" : ",").append(quoted(each));
            }
            return "[" + text + "]";
        }
        if (value instanceof Map) {
            for (Map.Entry<?, ?> each : ((Map<?, ?>) value).entrySet()) {
                text.append(text.length() == 0 ? "" : ",").append(quoted(String.valueOf(each.getKey()))).append(":");
                text.append(quoted(each.getValue()));
            }
            return "{" + text + "}";
        }
        for (char each : String.valueOf(value).toCharArray()) {
            text.append(each < ' ' || each == '"' || each == '\\' ? String.format("\\u%04x", (int) each) : "" + each);
        }
        return "\"" + text + "\"";
    }

    static void step(String name, Callable<Object> what) {
        try {
            System.out.println("{\"step\":" + quoted(name) + ",\"result\":" + quoted(what.call()) + "}");
        } catch (Throwable error) {
            System.out.println("{\"step\":" + quoted(name) + ",\"error\":" + quoted(error.toString()) + "}");
        }
    }

    static void await(BooleanSupplier condition) throws Exception {
        long end = System.currentTimeMillis() + DEADLINE_MS;
        while (!condition.getAsBoolean()) {
            if (System.currentTimeMillis() > end) {
                throw new IllegalStateException("the condition never held");
            }
            Thread.sleep(5);
        }
    }

    static String text(Message message) {
        return new String(message.getBody(), StandardCharsets.UTF_8);
    }

    static Message message(String topic, String tags, String key, String body) {
        return new Message(topic, tags, key, body.getBytes(StandardCharsets.UTF_8));
    }

    static DefaultMQPushConsumer consumer(String group, String instance) {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group);
        consumer.setNamesrvAddr(nameServer);
        consumer.setInstanceName(instance);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setPollNameServerInterval(1000);
        consumer.setMqClientApiTimeout(PATIENCE_MS);
        return consumer;
    }

    static DefaultMQProducer producer(String group) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer(group);
        producer.setNamesrvAddr(nameServer);
        producer.setInstanceName(group);
        producer.setCompressMsgBodyOverHowmuch(1000);
        producer.setSendMsgTimeout(PATIENCE_MS);
        producer.setMqClientApiTimeout(PATIENCE_MS);
        producer.start();
        return producer;
    }

    static Collection<String> consumed(DefaultMQPushConsumer consumer, int count) throws Exception {
        List<String> bodies = Collections.synchronizedList(new ArrayList<>());
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            messages.forEach(each -> bodies.add(text(each)));
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        await(() -> bodies.size() >= count);
        Thread.sleep(200);  // an unwanted message would have arrived by now
        consumer.shutdown();
        return new TreeSet<>(bodies).size() == bodies.size() ? new TreeSet<>(bodies) : bodies;
    }

    static Object everyWayOfSending(DefaultMQProducer producer) throws Exception {
        Map<String, Object> told = new TreeMap<>();
        told.put("sync", producer.send(message("plain", "a", "k1", "sync")).getSendStatus());
        CountDownLatch done = new CountDownLatch(1);
        producer.send(message("plain", "b", "k2", "async"), new SendCallback() {
            @Override
            public void onSuccess(SendResult result) {
                told.put("async", result.getSendStatus());
                done.countDown();
            }

            @Override
            public void onException(Throwable error) {
                told.put("async", error.toString());
                done.countDown();
            }
        });
        done.await(DEADLINE_MS, TimeUnit.MILLISECONDS);
        producer.sendOneway(message("plain", "c", "k3", "oneway"));
        List<Message> batch = new ArrayList<>();
        for (int number = 0; number < 3; number++) {
            batch.add(message("plain", "a", "b" + number, "batch-" + number));
        }
        SendResult result = producer.send(batch);
        told.put("batch", result.getSendStatus() + " " + result.getMsgId().split(",").length + " ids");
        StringBuilder large = new StringBuilder();
        for (int number = 0; number < 2000; number++) {
            large.append(number % 10);
        }
        told.put("compressed", producer.send(message("plain", "b", "k4", large.toString())).getSendStatus());
        MessageQueue queue = producer.fetchPublishMessageQueues("plain").get(1);
        told.put("chosen queue", producer.send(message("plain", "c", "k5", "chosen"), queue).getMessageQueue().getQueueId());
        return told;
    }

    static Object ordered(DefaultMQProducer producer) throws Exception {
        for (int number = 0; number < 60; number++) {
            producer.send(message("ordered", "", "", number % 3 + ":" + number),
                (queues, message, key) -> queues.get((Integer) key % queues.size()), number % 3);
        }
        Map<String, List<Integer>> seen = new ConcurrentHashMap<>();
        Set<Integer> refused = ConcurrentHashMap.newKeySet();
        DefaultMQPushConsumer consumer = consumer("orderly", "orderly");
        consumer.subscribe("ordered", "*");
        consumer.setSuspendCurrentQueueTimeMillis(50);
        consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
            String[] parts = text(messages.get(0)).split(":");
            int number = Integer.parseInt(parts[1]);
            if (number % 20 == 7 && refused.add(number)) {
                return ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT;
            }
            seen.computeIfAbsent(parts[0], key -> Collections.synchronizedList(new ArrayList<>())).add(number);
            return ConsumeOrderlyStatus.SUCCESS;
        });
        consumer.start();
        await(() -> seen.values().stream().mapToInt(List::size).sum() >= 60);
        consumer.shutdown();
        return new TreeMap<>(seen);
    }

    static Object transactions() throws Exception {
        Map<String, Integer> checks = new ConcurrentHashMap<>();
        TransactionMQProducer producer = new TransactionMQProducer("bank");
        producer.setNamesrvAddr(nameServer);
        producer.setInstanceName("bank");
        producer.setSendMsgTimeout(PATIENCE_MS);
        producer.setTransactionListener(new TransactionListener() {
            @Override
            public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
                return (LocalTransactionState) argument;
            }

            @Override
            public LocalTransactionState checkLocalTransaction(MessageExt message) {
                checks.merge(text(message), 1, Integer::sum);
                return text(message).endsWith("yes")
                    ? LocalTransactionState.COMMIT_MESSAGE : LocalTransactionState.ROLLBACK_MESSAGE;
            }
        });
        producer.start();
        Map<String, LocalTransactionState> fates = new TreeMap<>();
        fates.put("committed", LocalTransactionState.COMMIT_MESSAGE);
        fates.put("rolled back", LocalTransactionState.ROLLBACK_MESSAGE);
        fates.put("orphan, yes", LocalTransactionState.UNKNOW);
        fates.put("orphan, no", LocalTransactionState.UNKNOW);
        Map<String, Object> told = new TreeMap<>();
        for (Map.Entry<String, LocalTransactionState> fate : fates.entrySet()) {
            told.put(fate.getKey(), producer.sendMessageInTransaction(
                message("transfers", "t", fate.getKey(), fate.getKey()), fate.getValue()).getLocalTransactionState());
        }
        DefaultMQPushConsumer consumer = consumer("tellers", "tellers");
        consumer.subscribe("transfers", "*");
        told.put("consumed", consumed(consumer, 2));
        await(() -> checks.size() == 2);
        told.put("checked", new TreeMap<>(checks));
        producer.shutdown();
        return told;
    }

    static Object broadcast(DefaultMQProducer producer) throws Exception {
        Map<String, List<String>> seen = new ConcurrentHashMap<>();
        List<DefaultMQPushConsumer> screens = new ArrayList<>();
        for (String name : new String[] {"one", "two"}) {
            DefaultMQPushConsumer consumer = consumer("screens", name);
            consumer.setMessageModel(MessageModel.BROADCASTING);
            consumer.subscribe("prices", "*");
            seen.put(name, Collections.synchronizedList(new ArrayList<>()));
            consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                messages.forEach(each -> seen.get(name).add(text(each)));
                return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
            consumer.start();
            screens.add(consumer);
        }
        for (int number = 0; number < 8; number++) {
            producer.send(message("prices", "", "", "price-" + number));
        }
        await(() -> seen.values().stream().allMatch(each -> each.size() >= 8));
        screens.forEach(DefaultMQPushConsumer::shutdown);
        Map<String, Object> told = new TreeMap<>();
        seen.forEach((name, bodies) -> told.put(name, new TreeSet<>(bodies)));
        return told;
    }

    static Object shared(DefaultMQProducer producer) throws Exception {
        Map<String, Set<String>> seen = new ConcurrentHashMap<>();
        List<DefaultMQPushConsumer> workers = new ArrayList<>();
        for (String name : new String[] {"first", "second"}) {
            DefaultMQPushConsumer consumer = consumer("workers", name);
            consumer.subscribe("work", "*");
            seen.put(name, ConcurrentHashMap.newKeySet());
            consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                messages.forEach(each -> seen.get(name).add(text(each)));
                return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
            consumer.start();
            workers.add(consumer);
        }
        await(() -> workers.stream().allMatch(
            each -> each.getDefaultMQPushConsumerImpl().getRebalanceImpl().getProcessQueueTable().keySet().stream()
                .filter(queue -> queue.getTopic().equals("work")).count() == 2));
        for (int number = 0; number < 40; number++) {
            producer.send(message("work", "", "", "job-" + number));
        }
        await(() -> seen.get("first").size() + seen.get("second").size() >= 40);
        workers.forEach(DefaultMQPushConsumer::shutdown);
        Map<String, Object> told = new TreeMap<>();
        seen.forEach((name, bodies) -> told.put(name, bodies.size()));
        return told;
    }

    static Object pulled() throws Exception {
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer("pullers");
        consumer.setNamesrvAddr(nameServer);
        consumer.setInstanceName("pullers");
        consumer.start();
        List<String> found = new ArrayList<>();
        for (MessageQueue queue : new TreeSet<>(consumer.fetchSubscribeMessageQueues("plain"))) {
            long offset = Math.max(consumer.fetchConsumeOffset(queue, false), consumer.minOffset(queue));
            while (offset < consumer.maxOffset(queue)) {
                PullResult result = consumer.pull(queue, "a || b", offset, 4);
                if (result.getMsgFoundList() != null) {
                    result.getMsgFoundList().forEach(each -> found.add(text(each).substring(0, 4)));
                }
                offset = result.getNextBeginOffset();
            }
            consumer.updateConsumeOffset(queue, offset);
            found.add(consumer.pull(queue, "*", offset, 4).getPullStatus().toString());
        }
        consumer.shutdown();
        Collections.sort(found);
        return found;
    }

    static Object lite() throws Exception {
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer("lite");
        consumer.setNamesrvAddr(nameServer);
        consumer.setInstanceName("lite");
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setAutoCommit(false);
        consumer.subscribe("plain", "c");
        consumer.start();
        Set<String> found = new TreeSet<>();
        long end = System.currentTimeMillis() + DEADLINE_MS;
        while (found.size() < 2 && System.currentTimeMillis() < end) {
            consumer.poll(500).forEach(each -> found.add(text(each)));
        }
        consumer.commitSync();
        consumer.shutdown();
        return found;
    }

    static Object retried(DefaultMQProducer producer) throws Exception {
        Map<String, List<Integer>> seen = new ConcurrentHashMap<>();
        DefaultMQPushConsumer consumer = consumer("clerks", "clerks");
        consumer.subscribe("difficult", "*");
        consumer.setMaxReconsumeTimes(1);
        // A client that is shut down while it sends a message back does not get the reply, and sends a copy.
        consumer.setAwaitTerminationMillisWhenShutdown(DEADLINE_MS);
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            MessageExt message = messages.get(0);
            seen.computeIfAbsent(text(message), key -> new ArrayList<>()).add(message.getReconsumeTimes());
            context.setDelayLevelWhenNextConsume(1);
            boolean fine = text(message).equals("once") && message.getReconsumeTimes() > 0;
            return fine ? ConsumeConcurrentlyStatus.CONSUME_SUCCESS : ConsumeConcurrentlyStatus.RECONSUME_LATER;
        });
        consumer.start();
        producer.send(message("difficult", "", "", "once"));
        producer.send(message("difficult", "", "", "always"));
        await(() -> seen.values().stream().mapToInt(List::size).sum() >= 4);
        consumer.shutdown();
        DefaultMQPushConsumer dead = consumer("undertakers", "undertakers");
        dead.subscribe("%DLQ%clerks", "*");
        Map<String, Object> told = new TreeMap<>(seen);
        told.put("dead", consumed(dead, 1));
        return told;
    }

    static Object delayed(DefaultMQProducer producer) throws Exception {
        Map<String, Long> late = new ConcurrentHashMap<>();
        DefaultMQPushConsumer consumer = consumer("patient", "patient");
        consumer.subscribe("later", "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            messages.forEach(each -> late.put(text(each), each.getStoreTimestamp() - each.getBornTimestamp()));
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        for (int level = 1; level <= 2; level++) {
            Message message = message("later", "", "", "level-" + level);
            message.setDelayTimeLevel(level);
            producer.send(message);
        }
        await(() -> late.size() == 2);
        consumer.shutdown();
        return new TreeMap<>(late);
    }

    static Object filtered(DefaultMQProducer producer) throws Exception {
        for (int number = 0; number < 10; number++) {
            Message message = message("numbers", "", "", "number-" + number);
            message.putUserProperty("amount", String.valueOf(number * 10));
            message.putUserProperty("kind", number % 2 == 0 ? "even" : "odd");
            producer.send(message);
        }
        DefaultMQPushConsumer consumer = consumer("selective", "selective");
        consumer.subscribe("numbers", MessageSelector.bySql("kind = 'odd' AND amount BETWEEN 20 AND 80"));
        Map<String, Object> told = new TreeMap<>();
        told.put("passed", consumed(consumer, 3));
        try {
            DefaultMQPushConsumer wrong = consumer("mistaken", "mistaken");
            wrong.subscribe("numbers", MessageSelector.bySql("kind = = 'odd'"));
            wrong.registerMessageListener(
                (MessageListenerConcurrently) (messages, context) -> ConsumeConcurrentlyStatus.CONSUME_SUCCESS);
            wrong.start();
            told.put("wrong", "accepted");
        } catch (Exception error) {
            told.put("wrong", error.getMessage().split("\n")[0]);
        }
        return told;
    }

    static Object queried(DefaultMQProducer producer) throws Exception {
        Map<String, Object> told = new TreeMap<>();
        SendResult sent = producer.send(message("plain", "z", "wanted", "found"));
        await(() -> {
            try {
                return producer.queryMessage("plain", "wanted", 32, 0, Long.MAX_VALUE).getMessageList().size() == 1;
            } catch (Exception error) {
                return false;
            }
        });
        told.put("by offset id", text(producer.viewMessage("plain", sent.getOffsetMsgId())));
        told.put("by unique id", text(producer.viewMessage("plain", sent.getMsgId())));
        told.put("offset by time", producer.searchOffset(sent.getMessageQueue(), 0));
        told.put("max offset > 0", producer.maxOffset(sent.getMessageQueue()) > 0);
        told.put("min offset", producer.minOffset(sent.getMessageQueue()));
        told.put("oldest > 0", producer.earliestMsgStoreTime(sent.getMessageQueue()) > 0);
        return told;
    }

    static Object requested(DefaultMQProducer producer) throws Exception {
        DefaultMQProducer answering = producer("answering");
        DefaultMQPushConsumer consumer = consumer("servants", "servants");
        consumer.subscribe("requests", "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt each : messages) {
                if (!text(each).equals("silence")) {
                    try {
                        byte[] body = ("re: " + text(each)).getBytes(StandardCharsets.UTF_8);
                        answering.send(MessageUtil.createReplyMessage(each, body));
                    } catch (Exception error) {
                        return ConsumeConcurrentlyStatus.RECONSUME_LATER;
                    }
                }
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        Map<String, Object> told = new ConcurrentHashMap<>();
        told.put("reply", text(producer.request(message("requests", "", "", "one"), PATIENCE_MS)));
        CountDownLatch done = new CountDownLatch(1);
        producer.request(message("requests", "", "", "two"), new RequestCallback() {
            @Override
            public void onSuccess(Message reply) {
                told.put("reply to a callback", text(reply));
                done.countDown();
            }

            @Override
            public void onException(Throwable error) {
                told.put("reply to a callback", error.toString());
                done.countDown();
            }
        }, PATIENCE_MS);
        done.await(DEADLINE_MS, TimeUnit.MILLISECONDS);
        StringBuilder large = new StringBuilder("re: ");
        for (int number = 0; number < 500; number++) {
            large.append("large");
        }
        String reply = text(producer.request(message("requests", "", "", large.substring(4)), PATIENCE_MS));
        told.put("large reply", reply.equals(large.toString()));
        try {
            told.put("no reply", text(producer.request(message("requests", "", "", "silence"), 500)));
        } catch (Exception error) {
            told.put("no reply", error.getClass().getSimpleName());
        }
        consumer.shutdown();
        answering.shutdown();
        return new TreeMap<>(told);
    }

    public static void main(String[] arguments) throws Exception {
        nameServer = arguments[0];
        System.setProperty("rocketmq.client.logUseSlf4j", "true");
        DefaultMQProducer producer = producer("writers");
        step("send", () -> everyWayOfSending(producer));
        step("consume by tag", () -> {
            DefaultMQPushConsumer consumer = consumer("readers", "readers");
            consumer.subscribe("plain", "a || b");
            return consumed(consumer, 6);
        });
        step("pull", () -> pulled());
        step("lite pull", () -> lite());
        step("ordered", () -> ordered(producer));
        step("transactions", () -> transactions());
        step("broadcast", () -> broadcast(producer));
        step("shared", () -> shared(producer));
        step("retry", () -> retried(producer));
        step("delay", () -> delayed(producer));
        step("sql92", () -> filtered(producer));
        step("request", () -> requested(producer));
        step("query", () -> queried(producer));
        producer.shutdown();
        System.exit(0);
    }
}
