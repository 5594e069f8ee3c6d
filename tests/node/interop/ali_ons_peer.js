'use strict';
// A peer for the tests: the npm package ali-ons, unmodified; one JSON argument describes its task.
// Prints one JSON object a line; exits when its task is done, or when its standard input is closed.

const { Consumer, Producer, Message } = require('ali-ons');

const task = JSON.parse(process.argv[2]);
const quiet = { info() {}, debug() {}, warn() {}, error() {} };
const options = Object.assign({
  nameSrv: task.nameServer,
  httpclient: { request() { throw new Error('there is no HTTP here'); } },
  clientIP: '127.0.0.1',
  logger: quiet,
}, task.options);

function print(object) {
  process.stdout.write(JSON.stringify(object) + '\n');
}

// The same bytes as `body_of` in the test: every length from 0 up, every byte value, never valid UTF-8 for long.
function bodyOf(number) {
  const body = Buffer.alloc(number * 37 % 3001);
  for (let at = 0; at < body.length; at++) body[at] = number * 31 + at * 7 & 255;
  return body;
}

async function produce() {
  const producer = new Producer(Object.assign({ producerGroup: task.group }, options));
  producer.on('error', error => print({ error: String(error) }));
  await producer.ready();
  let next = task.first;
  const end = task.first + task.count;
  async function worker() {
    while (next < end) {
      const number = next++;
      const message = new Message(task.topic, `tag-${number % 3}`, bodyOf(number));
      message.keys = [ `k-${number}`, `all-${number % 10}` ];
      const result = await producer.send(message);
      print({ number, status: result.sendStatus, msgId: result.msgId, queue: result.messageQueue.queueId });
    }
  }
  await Promise.all(Array.from({ length: task.concurrency || 16 }, worker));
  await producer.close();
}

async function consume() {
  const consumer = new Consumer(Object.assign({ consumerGroup: task.group }, options));
  consumer.on('error', error => print({ error: String(error) }));
  const failed = new Set();
  consumer.subscribe(task.topic, task.expression || '*', async message => {
    if (task.failFirst && message.keys.startsWith(task.failFirst + ' ') && !failed.has(message.keys)) {
      failed.add(message.keys);
      print({ thrown: message.keys });
      throw new Error('the test wants it again');
    }
    print({
      keys: message.keys, tags: message.tags, body: (message.body || Buffer.alloc(0)).toString('base64'),
      reconsumeTimes: message.reconsumeTimes, msgId: message.msgId,
    });
  });
  await consumer.ready();
  print({ ready: true });
  await new Promise(resolve => process.stdin.on('end', resolve).resume());
  await consumer.close();
}

(task.action === 'produce' ? produce() : consume()).then(() => process.exit(0), error => {
  print({ error: String(error && error.stack || error) });
  process.exit(1);
});
