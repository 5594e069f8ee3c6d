// The Go client of RocketMQ, unmodified, doing what applications do with it. Prints one JSON object a line,
// {"step": NAME, "result": ...} or {"step": NAME, "error": TEXT}.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sort"
	"strings"
	"sync"
	"time"

	"github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
	"github.com/apache/rocketmq-client-go/v2/rlog"
)

const deadline = 90 * time.Second

var nameServers primitive.NamesrvAddr

func step(name string, what func() (any, error)) {
	line := map[string]any{"step": name}
	result, err := what()
	if err != nil {
		line["error"] = err.Error()
	} else {
		line["result"] = result
	}
	text, _ := json.Marshal(line)
	fmt.Println(string(text))
}

func newProducer(group string) (rocketmq.Producer, error) {
	made, err := rocketmq.NewProducer(producer.WithNameServer(nameServers), producer.WithGroupName(group),
		producer.WithInstanceName(group), producer.WithSendMsgTimeout(30*time.Second),
		producer.WithCompressMsgBodyOverHowmuch(1000))
	if err != nil {
		return nil, err
	}
	return made, made.Start()
}

// Consumes as a group until `count` messages have arrived.
func consumed(group, topic string, selector consumer.MessageSelector, count int, options ...consumer.Option) ([]string, error) {
	options = append(options, consumer.WithNameServer(nameServers), consumer.WithGroupName(group),
		consumer.WithInstance(group), consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset))
	made, err := rocketmq.NewPushConsumer(options...)
	if err != nil {
		return nil, err
	}
	var lock sync.Mutex
	var bodies []string
	failed := map[string]bool{}
	done := make(chan struct{})
	err = made.Subscribe(topic, selector,
		func(_ context.Context, messages ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
			lock.Lock()
			defer lock.Unlock()
			for _, message := range messages {
				body := string(message.Body)
				if strings.HasPrefix(body, "difficult") && !failed[body] {
					failed[body] = true
					return consumer.ConsumeRetryLater, nil
				}
				bodies = append(bodies, body)
				if len(bodies) == count {
					close(done)
				}
			}
			return consumer.ConsumeSuccess, nil
		})
	if err == nil {
		err = made.Start()
	}
	if err != nil {
		return nil, err
	}
	select {
	case <-done:
	case <-time.After(deadline):
		err = errors.New("not everything came")
	}
	made.Shutdown()
	lock.Lock()
	defer lock.Unlock()
	return bodies, err
}

type listener struct{}

func (listener) ExecuteLocalTransaction(message *primitive.Message) primitive.LocalTransactionState {
	switch string(message.Body) {
	case "committed":
		return primitive.CommitMessageState
	case "rolled back":
		return primitive.RollbackMessageState
	}
	return primitive.UnknowState
}

func (listener) CheckLocalTransaction(message *primitive.MessageExt) primitive.LocalTransactionState {
	if strings.HasSuffix(string(message.Body), "yes") {
		return primitive.CommitMessageState
	}
	return primitive.RollbackMessageState
}

func everyWayOfSending(sender rocketmq.Producer) (any, error) {
	background := context.Background()
	told := map[string]any{}
	sent, err := sender.SendSync(background, primitive.NewMessage("plain", []byte("sync")).WithTag("a").WithKeys([]string{"k"}))
	if err != nil {
		return nil, err
	}
	told["sync"] = sent.Status == primitive.SendOK
	answered := make(chan bool, 1)
	err = sender.SendAsync(background, func(_ context.Context, result *primitive.SendResult, err error) {
		answered <- err == nil && result.Status == primitive.SendOK
	}, primitive.NewMessage("plain", []byte("async")).WithTag("b"))
	if err != nil {
		return nil, err
	}
	told["async"] = <-answered
	if err = sender.SendOneWay(background, primitive.NewMessage("plain", []byte("oneway")).WithTag("c")); err != nil {
		return nil, err
	}
	batch := []*primitive.Message{primitive.NewMessage("plain", []byte("batch-0")).WithTag("a"),
		primitive.NewMessage("plain", []byte("batch-1")).WithTag("a")}
	sent, err = sender.SendSync(background, batch...)
	if err != nil {
		return nil, err
	}
	told["batch"] = sent.Status == primitive.SendOK
	sent, err = sender.SendSync(background, primitive.NewMessage("plain", []byte(strings.Repeat("0123456789", 200))).WithTag("b"))
	if err != nil {
		return nil, err
	}
	told["compressed"] = sent.Status == primitive.SendOK
	late := primitive.NewMessage("later", []byte("late")).WithDelayTimeLevel(1)
	_, err = sender.SendSync(background, late)
	return told, err
}

func main() {
	nameServers = primitive.NamesrvAddr{os.Args[1]}
	rlog.SetLogLevel("fatal")
	background := context.Background()
	sender, err := newProducer("writers")
	if err != nil {
		panic(err)
	}
	step("send", func() (any, error) { return everyWayOfSending(sender) })
	step("consume by tag", func() (any, error) {
		bodies, err := consumed("readers", "plain", consumer.MessageSelector{Type: consumer.TAG, Expression: "a || b"}, 5)
		sort.Strings(bodies)
		return bodies, err
	})
	step("delay", func() (any, error) { return consumed("patient", "later", consumer.MessageSelector{}, 1) })
	step("ordered", func() (any, error) {
		for number := 0; number < 20; number++ {
			message := primitive.NewMessage("ordered", []byte(fmt.Sprint(number)))
			if _, err := sender.SendSync(background, message); err != nil {
				return nil, err
			}
		}
		return consumed("orderly", "ordered", consumer.MessageSelector{}, 20, consumer.WithConsumerOrder(true))
	})
	step("retry", func() (any, error) {
		if _, err := sender.SendSync(background, primitive.NewMessage("difficult", []byte("difficult"))); err != nil {
			return nil, err
		}
		return consumed("clerks", "difficult", consumer.MessageSelector{}, 1)
	})
	step("broadcast", func() (any, error) {
		if _, err := sender.SendSync(background, primitive.NewMessage("prices", []byte("price"))); err != nil {
			return nil, err
		}
		return consumed("screens", "prices", consumer.MessageSelector{}, 1, consumer.WithConsumerModel(consumer.BroadCasting))
	})
	step("transactions", func() (any, error) {
		bank, err := rocketmq.NewTransactionProducer(listener{}, producer.WithNameServer(nameServers),
			producer.WithGroupName("bank"), producer.WithInstanceName("bank"), producer.WithSendMsgTimeout(30*time.Second))
		if err != nil {
			return nil, err
		}
		if err = bank.Start(); err != nil {
			return nil, err
		}
		for _, fate := range []string{"committed", "rolled back", "orphan, yes", "orphan, no"} {
			if _, err = bank.SendMessageInTransaction(background, primitive.NewMessage("transfers", []byte(fate))); err != nil {
				return nil, err
			}
		}
		bodies, err := consumed("tellers", "transfers", consumer.MessageSelector{}, 2)
		sort.Strings(bodies)
		bank.Shutdown()
		return bodies, err
	})
	step("sql92", func() (any, error) {
		for number := 0; number < 4; number++ {
			message := primitive.NewMessage("numbers", []byte(fmt.Sprint("number-", number)))
			message.WithProperty("amount", fmt.Sprint(number*10))
			if _, err := sender.SendSync(background, message); err != nil {
				return nil, err
			}
		}
		bodies, err := consumed("selective", "numbers", consumer.MessageSelector{Type: consumer.SQL92, Expression: "amount >= 20"}, 2)
		sort.Strings(bodies)
		return bodies, err
	})
	sender.Shutdown()
}
