(function () {
  var root = document.getElementById("live");
  if (!root || !window.EventSource) return;
  var SILENCE_MS = 5000, ANSWER_MS = 5000, RETRY_MS = 2000;
  var address = root.getAttribute("data-events");
  var verdict = document.getElementById("verdict"), lost = document.getElementById("lost");
  var source = null, heardAt = 0, isOver = false, isAsking = false;
  var before = null;  // the verdict when the connection was lost
  function show(id, text) { document.getElementById(id).textContent = text; }
  function number(value) { return Math.round(value).toLocaleString("en"); }
  function milliseconds(value) { return Number(value.toPrecision(3)).toLocaleString("en") + " ms"; }
  function pill(word, text) {
    verdict.className = "pill " + word;
    verdict.textContent = text;
  }
  function drawRates(rates) {
    var highest = Math.max.apply(null, rates.concat([1]));
    var width = 600 / Math.max(60, rates.length);
    var begin = 600 - width * rates.length;
    var path = rates.map(function (rate, place) {
      var height = 76 * rate / highest;
      return "M" + (begin + width * place).toFixed(1) + " 80v" + (-height).toFixed(1) + "h" + (width * 0.86).toFixed(1) + "v" + height.toFixed(1) + "z";
    });
    document.querySelector("#rates path").setAttribute("d", path.join(""));
    show("highest", rates.length ? "highest " + number(highest) : "");
  }
  function drawFaults(faults, more) {
    var list = document.getElementById("faults");
    list.textContent = "";
    var lines = faults.map(function (fault) { return fault.name + ": " + fault.state + ", " + fault.for_s.toFixed(1) + " s"; });
    if (more) lines.push("and " + more + " more");
    (lines.length ? lines : ["none"]).forEach(function (line) {
      var item = document.createElement("li");
      item.textContent = line;
      list.appendChild(item);
    });
  }
  // Mark the page as outdated until the next event arrives.
  function lose(why) {
    before = before || verdict.textContent;
    pill("unfinished", "not connected");
    lost.textContent = why + " This is the last known state.";
    lost.hidden = false;
  }
  function findAgain() {
    heardAt = Date.now();
    if (before === null) return;
    pill(before, before);
    before = null;
    lost.hidden = true;
  }
  function stop() {
    isOver = true;
    if (source) source.close();
  }
  // EventSource neither reports why it was refused nor retries then: send a HEAD request, then try again.
  function ask() {
    source.close();
    if (isOver || isAsking) return;
    isAsking = true;
    var limit = new AbortController();
    setTimeout(function () { limit.abort(); }, ANSWER_MS);
    fetch(address, { method: "HEAD", cache: "no-store", signal: limit.signal }).then(function (answer) {
      if (answer.status === 404) {
        stop();
        lose("The server does not have this run.");
      } else if (answer.status === 429) {
        lose("Too many live views are open on this server. This one continues once another is closed.");
      } else if (!answer.ok) {
        lose("The server refuses the view (" + answer.status + "). Retrying.");
      } else if (before === null) {
        lose("The connection to the server was lost. Reconnecting.");
      }
    }, function () {
      lose("The connection to the server is lost. The page continues when the server is back.");
    }).then(function () {
      if (!isOver) setTimeout(follow, RETRY_MS);
    });
  }
  function follow() {
    isAsking = false;
    heardAt = Date.now();
    source = new EventSource(address);
    source.onerror = ask;
    source.addEventListener("state", function (event) {
      var state = JSON.parse(event.data);
      findAgain();
      show("time", state.time_s.toFixed(1) + " s" + (state.is_behind ? ", catching up" : ""));
      show("rate", state.rate_per_s < 10 ? String(state.rate_per_s) : number(state.rate_per_s));
      ["ok", "fail", "info", "open"].forEach(function (name) { show(name, number(state[name])); });
      show("latency", state.median_ms === null ? "–" : milliseconds(state.median_ms) + ", " + milliseconds(state.p99_ms));
      drawRates(state.rates);
      drawFaults(state.faults, state.more_faults);
      if (state.damage) show("reason", "The history cannot be read: " + state.damage);
    });
    source.addEventListener("end", function (event) {
      var end = JSON.parse(event.data);
      stop();
      findAgain();
      pill(end.verdict, end.verdict);
      if (end.reason) show("reason", end.reason);
      drawFaults([], 0);
    });
  }
  // A stopped server process, or a machine that is gone, does not close the connection.
  setInterval(function () {
    if (isOver || isAsking || Date.now() - heardAt < SILENCE_MS) return;
    lose("The server does not respond. The page continues when it does.");
    ask();
  }, 1000);
  follow();
})();
