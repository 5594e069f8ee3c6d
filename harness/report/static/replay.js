(function () {
  "use strict";
  var data = JSON.parse(document.getElementById("data").textContent);
  var hosts = data.hosts, replicas = data.replicas, M = data.messages, O = data.operations;
  var byId = function (id) { return document.getElementById(id); };
  var ring = byId("ring"), whole = byId("whole"), near = byId("near"), scrub = byId("scrub");

  // Turns columns of differences into columns of moments, in µs.
  function sums(column) { var total = 0; return Float64Array.from(column, function (step) { total += step; return total; }); }
  var sent = sums(M.sent), started = sums(O.start);
  var messageCount = sent.length, operationCount = started.length;
  var losses = new Map();
  for (var i = 0; i < M.losses.length; i += 2) losses.set(M.losses[i], M.losses[i + 1]);
  var SLOW_US = 50000;
  var slow = [];
  for (i = 0; i < messageCount; i++) if (M.flight[i] < 0 || M.flight[i] > SLOW_US) slow.push(i);
  var longOperations = [];
  var LONG_US = 500000;
  for (i = 0; i < operationCount; i++) if (O.length[i] < 0 || O.length[i] > LONG_US) longOperations.push(i);
  var lanes = new Map(), LANES = 14, GUTTER = 28;

  function source(m) { return Math.floor(M.pair[m] / hosts.length); }
  function target(m) { return M.pair[m] % hosts.length; }
  function isReply(m) { return M.kind[m] % 2 === 1; }
  function kindOf(m) { return data.kinds[M.kind[m] >> 1]; }
  function words(m) { return kindOf(m) + (isReply(m) ? ": " : " ") + (data.details[M.detail[m]] || (isReply(m) ? "answered" : "")); }
  function after(column, value) { var low = 0, high = column.length; while (low < high) { var middle = (low + high) >> 1; if (column[middle] <= value) low = middle + 1; else high = middle; } return low; }

  // The end of each host's log as far as its messages show it (an append sent, or answered with ok), for traces without log states.
  var said = hosts.map(function () { return { at: [], index: [] }; });
  for (i = 0; i < messageCount; i++) {
    if (kindOf(i) !== "append") continue;
    var detail = data.details[M.detail[i]].replace(/ \+\d+$/, "");
    if (isReply(i) && detail.indexOf("ok") !== 0) continue;
    var number = /(\d+)$/.exec(detail);
    if (number) { said[source(i)].at.push(sent[i]); said[source(i)].index.push(+number[1]); }
  }
  // The end and the committed index of each log, if the trace has log states.
  var logs = hosts.map(function () { return { at: [], committed: [], end: [] }; }), logged = 0;
  data.logs.at.forEach(function (step, n) {
    var log = logs[data.logs.host[n]];
    logged += step;
    log.at.push(logged); log.committed.push(data.logs.committed[n]); log.end.push(data.logs.committed[n] + data.logs.ahead[n]);
  });
  var roles = hosts.map(function () { return { at: [], role: [], term: [] }; });
  var elections = [];
  data.roles.forEach(function (change) {
    var host = hosts.indexOf(change[1]);
    if (host < 0) return;
    roles[host].at.push(change[0]); roles[host].role.push(change[2]); roles[host].term.push(change[3]);
    if (change[2] === "leader") elections.push({ at: change[0], text: change[1] + " leads" + (change[3] ? " term " + change[3] : ""), host: host, term: change[3] });
  });

  // A leadership ends when the leader's role changes, another is elected, or a fault takes the host down (which it cannot log).
  elections.sort(function (a, b) { return a.at - b.at; });
  elections.forEach(function (one, n) {
    var changed = after(roles[one.host].at, one.at), other = n + 1 < elections.length ? elections[n + 1].at : Infinity;
    one.end = Math.min(other, changed < roles[one.host].at.length ? roles[one.host].at[changed] : Infinity);
  });
  data.faults.forEach(function (fault) {
    if (fault.down === null) return;
    elections.forEach(function (one) { if (fault.hosts.indexOf(hosts[one.host]) >= 0 && one.at < fault.down) one.end = Math.min(one.end, fault.down); });
  });

  var begin = Infinity, end = -Infinity;
  [[sent[0], sent[messageCount - 1]], [started[0], started[operationCount - 1]]].forEach(function (pair) {
    if (pair[0] !== undefined) { begin = Math.min(begin, pair[0]); end = Math.max(end, pair[1]); }
  });
  data.faults.forEach(function (fault) { begin = Math.min(begin, fault.start); end = Math.max(end, fault.end || fault.start); });
  data.violations.forEach(function (one) { begin = Math.min(begin, one.at); end = Math.max(end, one.at); });
  if (data.decided) { begin = Math.min(begin, data.decided[0]); end = Math.max(end, data.decided[1]); }
  for (i = 0; i < messageCount; i++) end = Math.max(end, sent[i] + M.flight[i]);
  for (i = 0; i < operationCount; i++) end = Math.max(end, started[i] + O.length[i]);
  if (begin > end) { begin = 0; end = 1000; }
  end += 20000;
  // If only a part of the run is shown, nothing is known outside of it.
  if (data.part[0] !== null) begin = data.part[0];
  if (data.part[1] !== null) end = data.part[1];
  if (begin >= end) { if (data.part[1] === null) end = begin + 1000; else begin = end - 1000; }

  // All events that the buttons step through, in order: [moment, kind of event, its number].
  var MESSAGE = 0, ARRIVAL = 1, INVOKE = 2, COMPLETE = 3, FAULT = 4, HEAL = 5, ROLE = 6, VIOLATION = 7;
  var steps = [];
  for (i = 0; i < messageCount; i++) { steps.push([sent[i], MESSAGE, i]); if (M.flight[i] >= 0) steps.push([sent[i] + M.flight[i], ARRIVAL, i]); }
  for (i = 0; i < operationCount; i++) { steps.push([started[i], INVOKE, i]); if (O.length[i] >= 0) steps.push([started[i] + O.length[i], COMPLETE, i]); }
  data.faults.forEach(function (fault, n) { steps.push([fault.start, FAULT, n]); if (fault.end !== null) steps.push([fault.end, HEAL, n]); });
  data.roles.forEach(function (change, n) { steps.push([change[0], ROLE, n]); });
  data.violations.forEach(function (one, n) { steps.push([one.at, VIOLATION, n]); });
  if (data.part[0] !== null || data.part[1] !== null) steps = steps.filter(function (step) { return step[0] >= begin && step[0] <= end; });
  steps.sort(function (a, b) { return a[0] - b[0] || a[1] - b[1]; });
  var stepTimes = Float64Array.from(steps, function (step) { return step[0]; });

  function stepText(step) {
    var n = step[2];
    switch (step[1]) {
      case MESSAGE: return hosts[source(n)] + " sends " + hosts[target(n)] + " " + words(n);
      case ARRIVAL: return hosts[target(n)] + " receives from " + hosts[source(n)] + " " + words(n);
      case INVOKE: return "process " + O.process[n] + " invokes " + data.texts[O.text[n]];
      case COMPLETE: return "process " + O.process[n] + " completes " + ["ok", "fail", "info"][O.outcome[n]] + " " + data.texts[O.text[n]];
      case FAULT: return "fault begins: " + data.faults[n].name;
      case HEAL: return "fault ends: " + data.faults[n].name;
      case ROLE: return data.roles[n][1] + " becomes " + data.roles[n][2] + (data.roles[n][3] ? " in term " + data.roles[n][3] : "");
      default: return "violation: " + data.violations[n].text;
    }
  }

  var now = data.violations.length ? data.violations[0].at : Math.max(begin, Math.min(0, end));
  var place = -1, playing = false, last = 0, chosen = null, dirty = true;
  var colours = {};
  function readColours() {
    var style = getComputedStyle(document.body);
    ["ink", "soft", "line", "surface", "page", "sunken", "ok", "fail", "info", "valid", "invalid", "unknown", "tint0"].forEach(function (name) {
      colours[name] = style.getPropertyValue("--" + name).trim();
    });
  }
  var CLASSES = { append: "ok", commit: "ok", compare: "ok", truncate: "ok", vote: "unknown", heartbeat: "valid", send: "tint0", "send batch": "tint0", pull: "tint0", "max offset": "tint0", "min offset": "tint0" };
  function colourOf(m) { return losses.has(m) || M.flight[m] < 0 ? colours.invalid : colours[CLASSES[kindOf(m)] || "soft"]; }
  function moment(us) { return (us / 1e6).toFixed(6).replace("-", "−") + " s"; }

  function fit(canvas) {
    var ratio = window.devicePixelRatio || 1, box = canvas.getBoundingClientRect();
    var width = Math.round(box.width * ratio), height = Math.round(box.height * ratio);
    if (canvas.width !== width || canvas.height !== height) { canvas.width = width; canvas.height = height; }
    var context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, box.width, box.height);
    return { c: context, w: box.width, h: box.height };
  }

  function placesOf(width, height) {
    var radius = Math.min(width, height) / 2 - 62, x = width / 2, y = height / 2 + 4;
    // Other hosts stand at the lower edge; on a narrow canvas the ring makes room for them.
    if (hosts.length > replicas + 1 && width < height * 1.4) { radius -= 22; y -= 30; }
    return hosts.map(function (name, n) {
      if (n < replicas) { var angle = -Math.PI / 2 + 2 * Math.PI * n / Math.max(1, replicas); return { x: x + radius * Math.cos(angle), y: y + radius * Math.sin(angle) }; }
      if (n === replicas) return { x: x, y: y };
      return { x: 46 + (n - replicas - 1) * 84, y: height - 34 };
    });
  }
  function roleAt(host, at) {
    var found = after(roles[host].at, at) - 1;
    return found < 0 ? null : { role: roles[host].role[found], term: roles[host].term[found] };
  }
  function indexAt(host, at) { var found = after(said[host].at, at) - 1; return found < 0 ? null : said[host].index[found]; }
  function logAt(host, at) {
    var log = logs[host], found = after(log.at, at) - 1;
    if (log.at.length) return found < 0 ? null : { end: log.end[found], committed: log.committed[found] };
    var index = indexAt(host, at);
    return index === null ? null : { end: index, committed: null };
  }
  function inForce(at) { return data.faults.filter(function (fault) { return fault.start <= at && (fault.end === null || fault.end > at); }); }
  function trail() { return playing ? Math.min(SLOW_US, 40000 * +byId("speed").value * 2) : 0; }
  function inFlight(at) {
    var back = trail(), found = [];
    for (var m = after(sent, at - SLOW_US - back - 1); m < messageCount && sent[m] <= at; m++) {
      var flight = M.flight[m];
      if (flight >= 0 && flight <= SLOW_US && sent[m] + flight >= at - back) found.push(m);
    }
    slow.forEach(function (m) { if (sent[m] <= at && (M.flight[m] < 0 ? at - sent[m] < 2e5 : sent[m] + M.flight[m] >= at)) found.push(m); });
    return found;
  }
  function progress(m, at) { return M.flight[m] < 0 ? Math.min(0.6, (at - sent[m]) / 1000) : Math.min(1, (at - sent[m]) / M.flight[m]); }
  function openOperations(at) {
    var found = [];
    for (var o = after(started, at - LONG_US - 1); o < operationCount && started[o] <= at; o++) if (O.length[o] >= 0 && O.length[o] <= LONG_US && started[o] + O.length[o] >= at) found.push(o);
    longOperations.forEach(function (o) { if (started[o] <= at && (O.length[o] < 0 || started[o] + O.length[o] >= at)) found.push(o); });
    return found;
  }

  var drawn = [], RADIUS = 30;
  function drawRing() {
    var f = fit(ring), c = f.c, at = placesOf(f.w, f.h), faults = inForce(now);
    c.lineWidth = 1; c.strokeStyle = colours.line;
    for (var a = 0; a < replicas; a++) for (var b = a + 1; b < replicas; b++) { c.beginPath(); c.moveTo(at[a].x, at[a].y); c.lineTo(at[b].x, at[b].y); c.stroke(); }
    c.setLineDash([6, 5]); c.lineWidth = 2; c.strokeStyle = colours.invalid;
    faults.forEach(function (fault) { fault.cuts.forEach(function (cut) {
      var from = at[hosts.indexOf(cut[0])], to = at[hosts.indexOf(cut[1])];
      if (!from || !to) return;
      // Only the sender's half of the line, so that a cut in one direction is half a line.
      c.beginPath(); c.moveTo(from.x, from.y); c.lineTo((from.x + to.x) / 2, (from.y + to.y) / 2); c.stroke();
    }); });
    c.setLineDash([]);
    drawn = [];
    inFlight(now).forEach(function (m) {
      var from = at[source(m)], to = at[target(m)], part = progress(m, now);
      var length = Math.hypot(to.x - from.x, to.y - from.y) || 1, side = 5, unitX = (to.x - from.x) / length, unitY = (to.y - from.y) / length;
      // From the edge of one circle to the edge of the other, offset so that the two directions do not overlap.
      var way = RADIUS + 6 + (length - 2 * RADIUS - 12) * part;
      var dx = -unitY * side, dy = unitX * side, x = from.x + unitX * way + dx, y = from.y + unitY * way + dy;
      c.strokeStyle = c.fillStyle = colourOf(m);
      c.globalAlpha = 0.45; c.lineWidth = 1.5; c.beginPath(); c.moveTo(from.x + unitX * RADIUS + dx, from.y + unitY * RADIUS + dy); c.lineTo(x, y); c.stroke(); c.globalAlpha = 1;
      c.beginPath(); c.arc(x, y, isReply(m) ? 4 : 5.5, 0, 7);
      if (isReply(m)) { c.lineWidth = 2; c.fillStyle = colours.surface; c.fill(); c.stroke(); } else c.fill();
      drawn.push({ x: x, y: y, message: m });
    });
    var messages = drawn.slice();
    hosts.forEach(function (name, n) { drawHost(c, at[n], name, n, faults); });
    if (messages.length > 14) return;
    c.font = "11px ui-monospace, monospace"; c.textAlign = "left"; c.fillStyle = colours.ink;
    messages.forEach(function (one) {
      var text = words(one.message).slice(0, 26);
      halo(c, text, Math.max(4, Math.min(one.x + 9, f.w - 7 * text.length - 4)), one.y - 7);
    });
  }
  // Text over lines: an outline in the background colour keeps it readable.
  function halo(c, text, x, y) { c.strokeStyle = colours.surface; c.lineWidth = 3; c.strokeText(text, x, y); c.fillText(text, x, y); }
  function drawHost(c, at, name, n, faults) {
    var isReplica = n < replicas, state = isReplica ? roleAt(n, now) : null;
    var struck = faults.filter(function (fault) { return fault.hosts.indexOf(name) >= 0; });
    var isDown = struck.some(function (fault) { return fault.down !== null && fault.down <= now; }) || (state && state.role === "stopped");
    var radius = RADIUS;
    c.beginPath(); c.arc(at.x, at.y, radius, 0, 7);
    c.fillStyle = isDown ? colours.sunken : state && state.role === "leader" ? colours.ok : colours.surface; c.fill();
    c.lineWidth = struck.length ? 3 : 1.5; c.strokeStyle = struck.length ? colours.invalid : state && state.role === "candidate" ? colours.unknown : colours.soft;
    c.stroke();
    c.textAlign = "center"; c.fillStyle = state && state.role === "leader" && !isDown ? colours.surface : colours.ink;
    c.font = "600 14px system-ui, sans-serif"; c.fillText(name, at.x, at.y + (state && state.term ? -1 : 5));
    c.font = "11px system-ui, sans-serif";
    if (state && state.term) c.fillText("term " + state.term, at.x, at.y + 13);
    c.fillStyle = colours.soft;
    if (isReplica) {
      var log = logAt(n, now);
      halo(c, isDown ? "down" : state ? state.role : "", at.x, at.y + radius + 13);
      if (log) halo(c, "log " + log.end + (log.committed === null ? "" : " ✓" + log.committed), at.x, at.y + radius + 26);
      c.fillStyle = colours.invalid;
      struck.slice(0, 1).forEach(function (fault) { halo(c, fault.kind, at.x, at.y - radius - 6); });
    } else if (n === replicas) halo(c, openOperations(now).length + " open", at.x, at.y + radius + 13);
    drawn.push({ x: at.x, y: at.y, host: n, radius: radius });
  }

  function xOf(us, from, to, width) { return (us - from) / (to - from) * width; }
  function drawWhole() {
    var f = fit(whole), c = f.c;
    c.font = "10px system-ui, sans-serif"; c.textAlign = "left";
    data.faults.forEach(function (fault, n) {
      var x = xOf(fault.start, begin, end, f.w), to = xOf(fault.end === null ? end : fault.end, begin, end, f.w);
      c.globalAlpha = 0.25; c.fillStyle = colours.fail; c.fillRect(x, 0, Math.max(2, to - x), f.h); c.globalAlpha = 1;
      // The fault's name if it fits before the next fault, else its number.
      x = Math.max(0, x);
      var next = data.faults[n + 1], room = (next ? xOf(next.start, begin, end, f.w) : f.w) - x - 6, number = fault.name.split(" ")[0];
      c.fillStyle = colours.ink;
      [fault.name, number].some(function (text) { var fits = c.measureText(text).width <= room; if (fits) c.fillText(text, x + 3, 11); return fits; });
    });
    elections.forEach(function (one) {
      var x = xOf(one.at, begin, end, f.w), to = xOf(Math.min(end, one.end), begin, end, f.w);
      c.fillStyle = colours.ok; c.fillRect(x, f.h - 24, Math.max(2, to - x - 1), 14);
      c.fillStyle = colours.surface; var leads = hosts[one.host] + (one.term ? " term " + one.term : " leads"); x = Math.max(0, x);
      if (to - x > c.measureText(leads).width + 6) c.fillText(leads, x + 3, f.h - 13);
    });
    if (data.decided) {
      // The interval in which the violation was decided, at least two pixels wide.
      var first = xOf(data.decided[0], begin, end, f.w), last = xOf(data.decided[1], begin, end, f.w);
      c.globalAlpha = 0.7; c.fillStyle = colours.unknown; c.fillRect(first - 1, 0, Math.max(2, last - first), f.h); c.globalAlpha = 1;
    }
    c.fillStyle = colours.invalid;
    data.violations.forEach(function (one) { var x = xOf(one.at, begin, end, f.w); c.fillRect(x - 1, 16, 2, f.h - 16); c.beginPath(); c.arc(x, 18, 4, 0, 7); c.fill(); });
    c.fillStyle = colours.ink; c.fillRect(xOf(now, begin, end, f.w) - 0.75, 0, 1.5, f.h);
  }
  var culprits = new Set();
  data.violations.forEach(function (one) { one.operations.forEach(function (pair) { culprits.add(pair[0] + "/" + pair[1]); }); });
  function nearUs() { return near.getBoundingClientRect().width * 50; }
  function drawNear() {
    var f = fit(near), c = f.c, from = now - nearUs(), to = now + nearUs(), height = f.h / LANES, shown = [];
    for (var o = after(started, from - LONG_US); o < operationCount && started[o] <= to; o++) if (O.length[o] >= 0 && O.length[o] <= LONG_US && started[o] + O.length[o] >= from) shown.push(o);
    longOperations.forEach(function (one) { if (started[one] <= to && (O.length[one] < 0 || started[one] + O.length[one] >= from)) shown.push(one); });
    // A lane for each process active here; if there are too many, those of the contradiction have precedence.
    var rank = new Map();
    shown.forEach(function (one) { var process = O.process[one]; rank.set(process, Math.min(rank.has(process) ? rank.get(process) : 1, culprits.has(process + "/" + started[one]) ? 0 : 1)); });
    var kept = Array.from(rank.keys()).sort(function (a, b) { return rank.get(a) - rank.get(b) || a - b; }).slice(0, LANES).sort(function (a, b) { return a - b; });
    lanes = new Map(kept.map(function (process, lane) { return [process, lane]; }));
    c.font = "10px ui-monospace, monospace"; c.textAlign = "left";
    var free = new Map();
    shown.sort(function (a, b) { return started[a] - started[b]; });
    function bar(o) {
      var lane = lanes.get(O.process[o]);
      if (lane === undefined) return;
      var x = Math.max(-2, xOf(started[o], from, to, f.w)), x2 = O.length[o] < 0 ? f.w + 2 : Math.min(f.w + 2, xOf(started[o] + O.length[o], from, to, f.w));
      var isCulprit = culprits.has(O.process[o] + "/" + started[o]);
      c.fillStyle = isCulprit ? colours.invalid : colours[["ok", "fail", "info"][O.outcome[o]]];
      c.globalAlpha = isCulprit ? 1 : 0.55; c.fillRect(x, lane * height + 2, Math.max(2, x2 - x), height - 4); c.globalAlpha = 1;
      var text = data.texts[O.text[o]], at = x2 + 2 > f.w ? Math.max(GUTTER + 2, x + 2) : Math.max(GUTTER + 2, x2 + 2);
      if (at < (free.get(lane) || 0)) return;
      free.set(lane, at + 6.1 * text.length);
      c.fillStyle = colours.ink; c.fillText(text, at, lane * height + height / 2 + 4);
    }
    shown.forEach(bar);
    if (rank.size > LANES) { c.fillStyle = colours.soft; c.textAlign = "right"; c.fillText(rank.size - LANES + " more processes", f.w - 4, f.h - 4); c.textAlign = "left"; }
    c.globalAlpha = 0.8; c.fillStyle = colours.page; c.fillRect(0, 0, GUTTER, f.h); c.globalAlpha = 1;
    c.fillStyle = colours.soft; lanes.forEach(function (lane, process) { c.fillText("p" + process, 2, lane * height + height / 2 + 4); });
    c.fillStyle = colours.ink; c.fillRect(f.w / 2 - 0.75, 0, 1.5, f.h);
  }

  function line(parent, text, className) { var p = document.createElement("p"); p.textContent = text; if (className) p.className = className; parent.appendChild(p); }
  function showNow(content) {
    data.violations.forEach(function (one) { if (Math.abs(one.at - now) < 1) line(content, one.text, "violation"); });
    if (data.decided && now >= data.decided[0] - 1 && now <= data.decided[1] + 1) line(content, "between here and " + moment(data.decided[1]) + " the violation was decided", "violation");
    if (place >= 0) line(content, stepText(steps[place]));
    inForce(now).forEach(function (fault) { line(content, "in force: " + fault.name + (fault.proven ? "" : " (not proven)"), "fault"); });
    openOperations(now).slice(0, 12).forEach(function (o) { line(content, "p" + O.process[o] + " " + data.texts[O.text[o]]); });
    inFlight(now).slice(0, 16).forEach(function (m) { line(content, hosts[source(m)] + " → " + hosts[target(m)] + " " + words(m)); });
  }
  function showChosen(content) {
    var n = chosen.n, p;
    if (chosen.kind === "message") {
      line(content, hosts[source(n)] + " → " + hosts[target(n)]); line(content, words(n)); line(content, "sent at " + moment(sent[n]));
      line(content, M.flight[n] < 0 ? "never arrived" : "arrives after " + M.flight[n] + " µs"); if (losses.has(n)) line(content, losses.get(n) + " times lost or held up behind a lost message");
    } else if (chosen.kind === "operation") {
      line(content, "process " + O.process[n]); line(content, data.texts[O.text[n]]); line(content, "from " + moment(started[n]));
      line(content, O.length[n] < 0 ? "never completed" : ["ok", "fail", "info"][O.outcome[n]] + " after " + O.length[n] + " µs");
    } else {
      var state = roleAt(n, now), log = logAt(n, now);
      if (state) line(content, state.role + (state.term ? " in term " + state.term : ""));
      if (log && log.committed === null) line(content, "log up to " + log.end + ", according to its messages");
      else if (log) line(content, "log up to " + log.end + ", committed up to " + log.committed);
      for (p = Math.max(0, after(roles[n].at, now) - 6); p < after(roles[n].at, now); p++) line(content, moment(roles[n].at[p]) + " " + roles[n].role[p] + " " + (roles[n].term[p] || ""));
      inFlight(now).filter(function (m) { return source(m) === n || target(m) === n; }).slice(0, 12).forEach(function (m) { line(content, hosts[source(m)] + " → " + hosts[target(m)] + " " + words(m)); });
    }
  }
  function showSide() {
    var content = byId("content");
    content.textContent = "";
    byId("clock").textContent = moment(now);
    byId("forget").hidden = !chosen;
    byId("what").textContent = !chosen ? "Now" : chosen.kind === "host" ? hosts[chosen.n] : chosen.kind === "message" ? "Message" : "Operation";
    if (chosen) showChosen(content); else showNow(content);
  }

  function frame(time) {
    if (playing) {
      now = Math.min(end, now + Math.min(100, time - last) * 1000 * +byId("speed").value);
      place = -1; dirty = true;
      if (now >= end) setPlaying(false);
    }
    last = time;
    if (dirty) {
      dirty = false;
      scrub.value = Math.round((now - begin) / (end - begin) * 1e6);
      drawRing(); drawWhole(); drawNear(); showSide();
    }
    requestAnimationFrame(frame);
  }
  function go(us, step) { now = Math.max(begin, Math.min(end, us)); place = step === undefined ? -1 : step; dirty = true; }
  function setPlaying(on) { playing = on; byId("play").textContent = on ? "Pause" : "Play"; dirty = true; }
  function stepOn() { var next = place >= 0 ? place + 1 : after(stepTimes, now); if (next < steps.length) go(stepTimes[next], next); setPlaying(false); }
  function stepBack() { var before = place >= 0 ? place - 1 : after(stepTimes, now - 0.5) - 1; if (before >= 0) go(stepTimes[before], before); setPlaying(false); }
  function matches(text, wanted) { return wanted.every(function (word) { return text.indexOf(word) >= 0; }); }
  function search() {
    var wanted = byId("find").value.toLowerCase().split(/\s+/).filter(Boolean), first = byId("after").value.toLowerCase().split(/\s+/).filter(Boolean);
    var step = place >= 0 ? place + 1 : after(stepTimes, now), waiting = first.length > 0;
    byId("found").textContent = "";
    if (!wanted.length) return;
    for (; step < steps.length; step++) {
      var text = stepText(steps[step]).toLowerCase();
      if (waiting) { if (matches(text, first)) waiting = false; continue; }
      if (matches(text, wanted)) { setPlaying(false); go(stepTimes[step], step); return; }
    }
    byId("found").textContent = "none after this moment";
  }
  function fillJump() {
    var jump = byId("jump");
    function group(name, items) {
      if (!items.length) return;
      var list = document.createElement("optgroup");
      list.label = name;
      items.slice(0, 200).forEach(function (item) { var option = document.createElement("option"); option.value = item.at; option.textContent = (item.at / 1e6).toFixed(3) + " s " + item.text.slice(0, 60); list.appendChild(option); });
      jump.appendChild(list);
    }
    if (data.decided) group("Where it was decided", [{ at: data.decided[0], text: "before it" }, { at: data.decided[1], text: "after it" }]);
    function shown(item) { return data.part[0] === null && data.part[1] === null || item.at >= begin && item.at <= end; }
    group("Violations", data.violations); group("Elections", elections.filter(shown));
    group("Faults", data.faults.map(function (fault) { return { at: fault.start, text: fault.name }; }).filter(shown));
    group("Ends of faults", data.faults.filter(function (fault) { return fault.end !== null; }).map(function (fault) { return { at: fault.end, text: fault.name }; }).filter(shown));
    jump.addEventListener("change", function () { if (jump.value) { setPlaying(false); go(+jump.value); jump.value = ""; } });
  }
  ring.addEventListener("click", function (event) {
    var box = ring.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    var hit = drawn.filter(function (one) { return Math.hypot(one.x - x, one.y - y) < (one.radius || 11); }).sort(function (a, b) { return (a.radius || 0) - (b.radius || 0); })[0];
    chosen = !hit ? null : hit.message !== undefined ? { kind: "message", n: hit.message } : { kind: "host", n: hit.host };
    dirty = true;
  });
  whole.addEventListener("click", function (event) { var box = whole.getBoundingClientRect(); go(begin + (event.clientX - box.left) / box.width * (end - begin)); });
  near.addEventListener("click", function (event) {
    var box = near.getBoundingClientRect(), at = now + ((event.clientX - box.left) / box.width * 2 - 1) * nearUs();
    var lane = Math.floor((event.clientY - box.top) / (box.height / LANES)), slack = nearUs() / 150;
    var hit = openOperations(at).concat(openOperations(at - slack), openOperations(at + slack)).filter(function (o) { return lanes.get(O.process[o]) === lane; })[0];
    if (hit === undefined) go(at); else chosen = { kind: "operation", n: hit };
    dirty = true;
  });
  scrub.addEventListener("input", function () { setPlaying(false); go(begin + scrub.value / 1e6 * (end - begin)); });
  byId("play").addEventListener("click", function () { if (now >= end) go(begin); setPlaying(!playing); });
  byId("on").addEventListener("click", stepOn);
  byId("back").addEventListener("click", stepBack);
  byId("search").addEventListener("click", search);
  byId("forget").addEventListener("click", function () { chosen = null; dirty = true; });
  ["find", "after"].forEach(function (id) { byId(id).addEventListener("keydown", function (event) { if (event.key === "Enter") search(); }); });
  document.addEventListener("keydown", function (event) {
    if (/^(INPUT|SELECT)$/.test(event.target.tagName) && event.target !== scrub) return;
    if (event.key === "ArrowRight") stepOn(); else if (event.key === "ArrowLeft") stepBack();
    else if (event.key === " " && event.target.tagName !== "BUTTON") setPlaying(!playing); else return;
    event.preventDefault();
  });
  window.addEventListener("resize", function () { dirty = true; });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", function () { readColours(); dirty = true; });
  readColours(); fillJump(); requestAnimationFrame(frame);
  document.body.setAttribute("data-ready", "yes");
})();
