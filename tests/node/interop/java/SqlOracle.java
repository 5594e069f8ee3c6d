import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.HashMap;
import java.util.Map;
import org.apache.rocketmq.filter.expression.EvaluationContext;
import org.apache.rocketmq.filter.expression.Expression;
import org.apache.rocketmq.filter.parser.SelectorParser;

/**
 * Results of RocketMQ's filter, line by line: an expression, line breaks as \\n, then names and values of properties,
 * all separated by tabs; the answer is true, false, null, refused (by the parser) or error (during evaluation).
 */
public class SqlOracle {
    public static void main(String[] arguments) throws Exception {
        BufferedReader input = new BufferedReader(new InputStreamReader(System.in, "UTF-8"));
        for (String line = input.readLine(); line != null; line = input.readLine()) {
            System.out.println(answer(line.split("\t", -1)));
        }
    }

    private static String answer(String[] parts) {
        Map<String, Object> properties = new HashMap<>();
        for (int at = 1; at + 1 < parts.length; at += 2) {
            properties.put(parts[at], parts[at + 1]);
        }
        Expression expression;
        try {
            expression = SelectorParser.parse(parts[0].replace("\\n", "\n"));
        } catch (Throwable refused) {
            return "refused";
        }
        try {
            return String.valueOf(expression.evaluate(new EvaluationContext() {
                @Override
                public Object get(String name) {
                    return properties.get(name);
                }

                @Override
                public Map<String, Object> keyValues() {
                    return properties;
                }
            }));
        } catch (Throwable failed) {
            return "error";
        }
    }
}
