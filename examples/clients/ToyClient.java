// A client of the toy system in Java, by JSON lines. A real one would use a JSON library and the system's own driver.
//
//     harness run --system toy --client "java examples/clients/ToyClient.java"

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.net.Socket;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

public class ToyClient {
    private static BufferedReader reader;
    private static PrintStream writer;

    /** The value of a field, as it is written in a line of JSON; null where there is none. */
    static String field(String json, String name) {
        Matcher found = Pattern.compile("\"" + name + "\": ?(\"[^\"]*\"|[^,}\\s]+)").matcher(json);
        return found.find() ? found.group(1) : null;
    }

    /** Writes registers to the toy's server and returns all of them. */
    static String call(String change) throws IOException {
        writer.println(change);
        String line = reader.readLine();
        if (line == null) {
            throw new IOException("the server closed the connection");
        }
        return line;
    }

    /** The answer to one message, without its braces and its id. */
    static String answer(String type, String message) throws IOException {
        if (type.equals("\"hello\"")) {
            return "\"type\": \"hello\", \"capabilities\": [\"read\", \"write\"]";
        }
        if (type.equals("\"open\"")) {
            String[] address = field(message, "n1").replace("\"", "").split(":"); // the toy lives on the first host alone
            Socket socket = new Socket(address[0], Integer.parseInt(address[1]));
            reader = new BufferedReader(new InputStreamReader(socket.getInputStream()));
            writer = new PrintStream(socket.getOutputStream(), true);
        } else if (type.equals("\"invoke\"") && field(message, "f").equals("\"write\"")) {
            call("{\"" + field(message, "key") + "\": " + field(message, "value") + "}");
        } else if (type.equals("\"invoke\"")) {
            String value = field(call("{}"), field(message, "key"));
            return "\"type\": \"ok\", \"value\": " + value;
        }
        return "\"type\": \"ok\"";
    }

    public static void main(String[] arguments) throws IOException {
        BufferedReader input = new BufferedReader(new InputStreamReader(System.in));
        for (String line; (line = input.readLine()) != null; ) {
            String type = field(line, "type");
            String reply;
            try {
                reply = answer(type, line);
            } catch (IOException error) {
                // Before the request was sent it certainly did not happen; after that, a write may have.
                boolean certain = type.equals("\"open\"") || "\"read\"".equals(field(line, "f"));
                reply = "\"type\": \"" + (certain ? "fail" : "info") + "\", \"error\": \"" + error.getClass() + "\"";
            }
            System.out.println("{\"id\": " + field(line, "id") + ", " + reply + "}");
            System.out.flush();
        }
    }
}
