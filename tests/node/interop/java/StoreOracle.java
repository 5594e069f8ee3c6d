import java.io.File;
import java.nio.ByteBuffer;
import java.security.MessageDigest;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.store.ConsumeQueue;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.SelectMappedBufferResult;
import org.apache.rocketmq.store.config.FlushDiskType;
import org.apache.rocketmq.store.config.MessageStoreConfig;
import org.apache.rocketmq.store.stats.BrokerStatsManager;

/**
 * Opens stores with RocketMQ's own store and prints what it finds, a line of JSON for each: where the log ends, and for
 * each queue its first number, the next one, and SHA-256 of its units and of its records.
 *
 * Arguments: the size of a file of the log, then the directories.
 */
public class StoreOracle {
    private static final int STORES_AT_ONCE = 8;

    public static void main(String[] arguments) throws Exception {
        int segmentBytes = Integer.parseInt(arguments[0]);
        // A store spends its time waiting for its threads; its memory is that of its files.
        ExecutorService pool = Executors.newFixedThreadPool(STORES_AT_ONCE);
        List<Future<String>> found = new ArrayList<>();
        for (int at = 1; at < arguments.length; at++) {
            String directory = arguments[at];
            found.add(pool.submit(() -> look(directory, segmentBytes)));
        }
        try {
            for (Future<String> each : found) {
                System.out.println(each.get());
            }
            System.out.flush();
        } catch (Throwable error) {
            error.printStackTrace();
            Runtime.getRuntime().halt(1); // the stores' threads would run for ever
        }
        Runtime.getRuntime().halt(0);
    }

    private static String look(String directory, int segmentBytes) throws Exception {
        MessageStoreConfig config = new MessageStoreConfig();
        config.setStorePathRootDir(directory);
        config.setStorePathCommitLog(directory + File.separator + "commitlog");
        config.setMappedFileSizeCommitLog(segmentBytes);
        config.setMappedFileSizeConsumeQueue(20 * 1000);
        config.setMaxHashSlotNum(1000);
        config.setMaxIndexNum(4000);
        config.setHaListenPort(0);
        config.setFlushDiskType(FlushDiskType.ASYNC_FLUSH);
        config.setDiskMaxUsedSpaceRatio(95);
        DefaultMessageStore store;
        synchronized (StoreOracle.class) { // its constructor writes to a static TreeMap (StoreStatsService)
            store = new DefaultMessageStore(
                config, new BrokerStatsManager("oracle", false),
                (topic, queueId, offset, tags, time, bits, properties) -> { }, new BrokerConfig());
        }
        // Its crash recovery makes queues before it has read the delays of the levels, and takes each for one second.
        store.getScheduleMessageService().parseDelayLevel();
        if (!store.load()) {
            return "{\"directory\": \"" + directory + "\", \"error\": \"the store cannot be loaded\"}";
        }
        store.start();
        while (store.dispatchBehindBytes() > 0) {
            Thread.sleep(10);
        }
        StringBuilder queues = new StringBuilder();
        Map<String, Map<Integer, ConsumeQueue>> table = new TreeMap<>(store.getConsumeQueueTable());
        for (Map.Entry<String, Map<Integer, ConsumeQueue>> topic : table.entrySet()) {
            for (Map.Entry<Integer, ConsumeQueue> queue : new TreeMap<>(topic.getValue()).entrySet()) {
                queues.append(queues.length() > 0 ? ", " : "");
                queues.append('"').append(topic.getKey()).append('/').append(queue.getKey()).append("\": ");
                queues.append(of(store, queue.getValue()));
            }
        }
        long end = store.getMaxPhyOffset();
        new Thread(store::shutdown).start(); // takes seconds, and nothing waits for it
        return "{\"directory\": \"" + directory + "\", \"end\": " + end + ", \"queues\": {" + queues + "}}";
    }

    private static String of(DefaultMessageStore store, ConsumeQueue queue) throws Exception {
        MessageDigest units = MessageDigest.getInstance("SHA-256");
        MessageDigest records = MessageDigest.getInstance("SHA-256");
        long first = queue.getMinOffsetInQueue();
        long next = queue.getMaxOffsetInQueue();
        for (long number = first; number < next; ) {
            SelectMappedBufferResult read = queue.getIndexBuffer(number);
            ByteBuffer buffer = read.getByteBuffer();
            byte[] unit = new byte[20];
            while (buffer.remaining() >= 20 && number < next) {
                buffer.get(unit);
                ByteBuffer fields = ByteBuffer.wrap(unit);
                SelectMappedBufferResult message = store.selectOneMessageByOffset(fields.getLong(), fields.getInt());
                if (message != null) {
                    byte[] record = new byte[message.getByteBuffer().remaining()];
                    message.getByteBuffer().get(record);
                    message.release();
                    units.update(unit);
                    records.update(record);
                }
                number++;
            }
            read.release();
        }
        return "[" + first + ", " + next + ", \"" + hex(units) + "\", \"" + hex(records) + "\"]";
    }

    private static String hex(MessageDigest digest) {
        StringBuilder text = new StringBuilder();
        for (byte each : digest.digest()) {
            text.append(String.format("%02x", each));
        }
        return text.toString();
    }
}
