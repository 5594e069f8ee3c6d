// A client of the toy system in Go, by JSON lines.
//
//	go build -o toy_client examples/clients/toy_client.go
//	harness run --system toy --client ./toy_client
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net"
	"os"
)

type message struct {
	ID        int                          `json:"id"`
	Type      string                       `json:"type"`
	F         string                       `json:"f"`
	Key       int                          `json:"key"`
	Value     json.RawMessage              `json:"value"`
	Addresses map[string]map[string]string `json:"addresses"`
}

type reply map[string]any

var server *bufio.ReadWriter

// call writes registers to the toy's server and returns all of them.
func call(change map[string]json.RawMessage) (map[string]json.RawMessage, error) {
	request, err := json.Marshal(change)
	if err != nil {
		return nil, err
	}
	if _, err := server.Write(append(request, '\n')); err != nil {
		return nil, err
	}
	if err := server.Flush(); err != nil {
		return nil, err
	}
	line, err := server.ReadBytes('\n')
	if err != nil {
		return nil, err
	}
	var registers map[string]json.RawMessage
	return registers, json.Unmarshal(line, &registers)
}

func answer(m message) (reply, error) {
	switch {
	case m.Type == "hello":
		return reply{"type": "hello", "capabilities": []string{"read", "write"}}, nil
	case m.Type == "open":
		connection, err := net.Dial("tcp", m.Addresses["client"]["n1"]) // the toy lives on the first host alone
		if err != nil {
			return nil, err
		}
		server = bufio.NewReadWriter(bufio.NewReader(connection), bufio.NewWriter(connection))
	case m.F == "write":
		_, err := call(map[string]json.RawMessage{fmt.Sprint(m.Key): m.Value})
		return reply{"type": "ok"}, err
	case m.F == "read":
		registers, err := call(map[string]json.RawMessage{})
		return reply{"type": "ok", "value": registers[fmt.Sprint(m.Key)]}, err
	}
	return reply{"type": "ok"}, nil
}

func main() {
	input, output := bufio.NewReader(os.Stdin), json.NewEncoder(os.Stdout)
	for {
		line, err := input.ReadBytes('\n')
		if err != nil {
			return
		}
		var m message
		if err := json.Unmarshal(line, &m); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		r, err := answer(m)
		if err != nil {
			kind := "info" // a write may have happened
			if m.Type == "open" || m.F == "read" {
				kind = "fail"
			}
			r = reply{"type": kind, "error": err.Error()}
		}
		r["id"] = m.ID
		output.Encode(r)
	}
}
