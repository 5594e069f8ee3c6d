(function () {
  var root = document.getElementById("live");
  if (!root || !window.EventSource) return;
  function show(id, text) { document.getElementById(id).textContent = text; }
  function number(value) { return Math.round(value).toLocaleString("en"); }
  function drawRates(rates) {
    var highest = Math.max.apply(null, rates.concat([1]));
    var width = 600 / Math.max(60, rates.length);
    var begin = 600 - width * rates.length;
    var path = rates.map(function (rate, place) {
      var height = 76 * rate / highest;
      return "M" + (begin + width * place).toFixed(1) + " 80v" + (-height).toFixed(1) + "h" + (width * 0.86).toFixed(1) + "v" + height.toFixed(1) + "z";
    });
    document.querySelector("#rates path").setAttribute("d", path.join(""));
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
  var source = new EventSource(root.getAttribute("data-events"));
  source.addEventListener("state", function (event) {
    var state = JSON.parse(event.data);
    show("time", state.time_s.toFixed(1) + " s");
    show("rate", number(state.rate_per_s));
    ["ok", "fail", "info", "open"].forEach(function (name) { show(name, number(state[name])); });
    show("latency", state.median_ms === null ? "–" : state.median_ms + " ms, " + state.p99_ms + " ms");
    drawRates(state.rates);
    drawFaults(state.faults, state.more_faults);
    if (state.damage) show("reason", "The history cannot be followed: " + state.damage);
  });
  source.addEventListener("end", function (event) {
    var end = JSON.parse(event.data);
    source.close();
    var pill = document.getElementById("verdict");
    pill.className = "pill " + end.verdict;
    pill.textContent = end.verdict;
    if (end.reason) show("reason", end.reason);
    drawFaults([], 0);
  });
})();
