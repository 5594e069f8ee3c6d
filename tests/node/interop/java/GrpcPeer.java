// The gRPC client of RocketMQ 5 (rocketmq-client-java), unmodified, at a proxy. Prints one JSON object a line,
// {"step": NAME, "result": ...} or {"step": NAME, "error": TEXT}.

import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.Collections;
import java.util.Set;
import java.util.TreeSet;
import java.util.concurrent.Callable;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.SimpleConsumer;
import org.apache.rocketmq.client.apis.message.MessageBuilder;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.Producer;
import org.apache.rocketmq.client.apis.producer.Transaction;
import org.apache.rocketmq.client.apis.producer.TransactionResolution;

public class GrpcPeer {
    static final long DEADLINE_MS = 60000;
    static ClientServiceProvider provider;

    static void step(String name, Callable<Object> what) {
        String kind = "result";
        String text;
        try {
            text = String.valueOf(what.call());
        } catch (Throwable error) {
            kind = "error";
            text = error.getClass().getSimpleName() + ": " + error.getMessage().replaceAll("request-id=[^,]*, ", "");
        }
        text = text.replace("\\", "\\\\").replace("\"", "\\\"").replace("\n", " ");
        System.out.println("{\"step\":\"" + name + "\",\"" + kind + "\":\"" + text + "\"}");
    }

    static MessageBuilder message(String topic, String body) {
        return provider.newMessageBuilder().setTopic(topic).setTag("a").setKeys("k")
            .setBody(body.getBytes(StandardCharsets.UTF_8));
    }

    static Object sent(Producer producer, MessageBuilder message) throws Exception {
        return producer.send(message.build()).getMessageId().toString().isEmpty() ? "no id" : "sent";
    }

    static Object inTransaction(Producer producer, String body, boolean commits) throws Exception {
        Transaction transaction = producer.beginTransaction();
        producer.send(message("transactional", body).build(), transaction);
        if (commits) {
            transaction.commit();
        } else {
            transaction.rollback();
        }
        return "done";
    }

    static Object received(ClientConfiguration configuration, String topic, int count) throws Exception {
        SimpleConsumer consumer = provider.newSimpleConsumerBuilder().setClientConfiguration(configuration)
            .setConsumerGroup("simple").setAwaitDuration(Duration.ofSeconds(5))
            .setSubscriptionExpressions(Collections.singletonMap(topic, new FilterExpression("*"))).build();
        Set<String> bodies = new TreeSet<>();
        long end = System.currentTimeMillis() + DEADLINE_MS;
        while (bodies.size() < count && System.currentTimeMillis() < end) {
            for (MessageView each : consumer.receive(16, Duration.ofSeconds(15))) {
                bodies.add(StandardCharsets.UTF_8.decode(each.getBody()).toString());
                consumer.ack(each);
            }
        }
        consumer.close();
        return bodies;
    }

    static SimpleConsumer simple(ClientConfiguration configuration, String group, String topic) throws Exception {
        return provider.newSimpleConsumerBuilder().setClientConfiguration(configuration).setConsumerGroup(group)
            .setAwaitDuration(Duration.ofSeconds(3))
            .setSubscriptionExpressions(Collections.singletonMap(topic, new FilterExpression("*"))).build();
    }

    static MessageView next(SimpleConsumer consumer, String topic) throws Exception {
        long end = System.currentTimeMillis() + DEADLINE_MS;
        while (System.currentTimeMillis() < end) {
            for (MessageView each : consumer.receive(1, Duration.ofSeconds(10))) {
                return each;
            }
        }
        throw new IllegalStateException("nothing came");
    }

    static String told(MessageView message) {
        return StandardCharsets.UTF_8.decode(message.getBody()) + " attempt " + message.getDeliveryAttempt();
    }

    static Object againAndAgain(ClientConfiguration configuration) throws Exception {
        SimpleConsumer consumer = simple(configuration, "forgetful", "normal");
        StringBuilder text = new StringBuilder(told(next(consumer, "normal")));
        MessageView second = next(consumer, "normal");  // the first one was not acknowledged
        text.append(", ").append(told(second));
        consumer.changeInvisibleDuration(second, Duration.ofSeconds(12));
        MessageView third = next(consumer, "normal");
        text.append(", ").append(told(third));
        consumer.ack(third);
        text.append(", then ").append(consumer.receive(1, Duration.ofSeconds(10)).size());
        consumer.close();
        return text;
    }

    static Object inOrder(ClientConfiguration configuration) throws Exception {
        SimpleConsumer consumer = simple(configuration, "ordered", "fifo");
        StringBuilder text = new StringBuilder();
        for (int number = 0; number < 2; number++) {
            MessageView each = next(consumer, "fifo");
            text.append(told(each)).append(", before it is acknowledged ");
            text.append(consumer.receive(1, Duration.ofSeconds(10)).size()).append("; ");
            consumer.ack(each);
        }
        consumer.close();
        return text;
    }

    public static void main(String[] arguments) throws Exception {
        provider = ClientServiceProvider.loadService();
        ClientConfiguration configuration = ClientConfiguration.newBuilder().setEndpoints(arguments[0]).enableSsl(false)
            .setRequestTimeout(Duration.ofSeconds(20)).build();
        Producer producer = provider.newProducerBuilder().setClientConfiguration(configuration)
            .setTopics("normal", "fifo", "later", "transactional")
            .setTransactionChecker(message -> TransactionResolution.COMMIT).build();
        step("send", () -> sent(producer, message("normal", "one")));
        step("send in a message group", () -> sent(producer, message("fifo", "two").setMessageGroup("g")));
        step("send in a transaction and commit", () -> inTransaction(producer, "three", true));
        step("send in a transaction and roll back", () -> inTransaction(producer, "four", false));
        step("send to a topic for other messages", () -> sent(producer, message("fifo", "five")));
        step("send for a time", () -> sent(producer, message("later", "six")
            .setDeliveryTimestamp(System.currentTimeMillis() + 1000)));
        step("send to an unknown topic", () -> sent(producer, message("nowhere", "seven")));
        step("send another in the message group", () -> sent(producer, message("fifo", "eight").setMessageGroup("g")));
        step("receive and acknowledge", () -> received(configuration, "normal", 1));
        step("receive and acknowledge what was committed", () -> received(configuration, "transactional", 1));
        step("receive what was sent for a time", () -> received(configuration, "later", 1));
        step("receive, forget, ask for another time, acknowledge", () -> againAndAgain(configuration));
        step("receive in order", () -> inOrder(configuration));
        System.exit(0);
    }
}
