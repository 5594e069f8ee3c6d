document.addEventListener("click", function (event) {
  var button = event.target.closest("button[data-copy]");
  if (!button) return;
  var source = document.getElementById(button.getAttribute("data-copy"));
  function done(word) {
    button.textContent = word;
    setTimeout(function () { button.textContent = "Copy"; }, 1600);
  }
  function select() {
    var range = document.createRange();
    range.selectNodeContents(source);
    var selection = getSelection();
    selection.removeAllRanges();
    selection.addRange(range);
    done(document.execCommand("copy") ? "Copied" : "Selected");
  }
  if (navigator.clipboard && navigator.clipboard.writeText) {
    navigator.clipboard.writeText(source.textContent).then(function () { done("Copied"); }, select);
  } else {
    select();
  }
});

// The charts over time: a common cursor with a text for the moment, and zoom. They are drawn in percent of their width, so
// zooming widens the drawing within its box; the size of the texts stays.
(function () {
  "use strict";
  var figure = document.querySelector(".panels"), source = document.getElementById("readout");
  if (!figure || !source) return;
  var data = JSON.parse(source.textContent), whole = data.end, from = 0, to = whole, at = null, drag = null;
  var tip = figure.querySelector(".readout"), zoom = figure.querySelector(".zoom"), range = figure.querySelector(".range");
  var NS = "http://www.w3.org/2000/svg", STEPS_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400];
  var list = function (selector) { return Array.prototype.slice.call(figure.querySelectorAll(selector)); };
  var places = list(".drawing").map(function (box) {
    return { box: box, svg: box.querySelector("svg"), cursor: added(box, "cursor"), selection: added(box, "selection") };
  });
  var labels = list("[data-needs]"), first = places[0].box;

  function added(box, name) { var made = document.createElement("div"); made.className = name; made.hidden = true; box.appendChild(made); return made; }
  function drawn(tag, attributes, text) {
    var made = document.createElementNS(NS, tag);
    Object.keys(attributes).forEach(function (name) { made.setAttribute(name, attributes[name]); });
    if (text) made.textContent = text;
    return made;
  }
  function words(ns, step) {
    var seconds = ns / 1e9, digits = step >= 1e9 ? 0 : Math.min(6, Math.ceil(-Math.log10(step / 1e9) - 1e-9));
    if (seconds < 120) return seconds.toFixed(digits) + " s";
    var hours = Math.floor(seconds / 3600), minutes = Math.floor(seconds / 60) % 60, rest = (seconds % 60).toFixed(digits);
    return (hours ? hours + " h " : "") + minutes + " min" + (+rest ? " " + rest + " s" : "");
  }
  function stepOf(span) {
    var wanted = first.clientWidth < 500 ? 4 : 8, seconds = span / 1e9 / wanted;
    var found = STEPS_S.filter(function (step) { return step >= seconds; })[0] || Math.ceil(seconds / 86400) * 86400;
    if (seconds < 1) { var ten = Math.pow(10, Math.floor(Math.log10(seconds))); found = [1, 2, 5, 10].filter(function (n) { return n * ten >= seconds * 0.999; })[0] * ten; }
    return found * 1e9;
  }
  function percent(ns) { return (100 * ns / whole).toFixed(4) + "%"; }

  function redraw() {
    var zoomed = from > 0 || to < whole, part = whole / (to - from), step = stepOf(to - from);
    figure.classList.toggle("zoomed", zoomed);
    list(".own").forEach(function (old) { old.remove(); });
    places.forEach(function (place) {
      place.svg.style.width = 100 * part + "%";
      place.svg.style.marginLeft = -100 * from / (to - from) + "%";
      if (!zoomed) return;
      var original = place.svg.querySelector(".vertical"), isAxis = place.svg.classList.contains("axis");
      for (var tick = Math.ceil(from / step) * step; tick <= to; tick += step) {
        var share = (tick - from) / (to - from), anchor = share < 0.04 ? "start" : share > 0.96 ? "end" : "middle";
        if (isAxis) place.svg.appendChild(drawn("text", { x: percent(tick), y: 13, "text-anchor": anchor, class: "tick own" }, words(tick, step)));
        else if (original) place.svg.insertBefore(drawn("line", { x1: percent(tick), x2: percent(tick), y1: 0, y2: "100%", class: "grid own" }), original);
      }
    });
    labels.forEach(function (label) { label.style.display = +label.getAttribute("data-needs") <= label.getAttribute("data-room") * first.clientWidth * part ? "inline" : "none"; });
    range.textContent = zoomed ? words(from, step / 10) + " to " + words(to, step / 10) : "";
    ["out", "earlier", "later", "whole"].forEach(function (name) { zoom.querySelector("[data-zoom=" + name + "]").disabled = !zoomed; });
    point();
  }
  function look(start, end) {
    var span = Math.min(whole, Math.max(end - start, Math.min(whole, data.least)));
    from = Math.max(0, Math.min(whole - span, (start + end - span) / 2));
    to = from + span;
    redraw();
  }
  function scale(factor) { var span = (to - from) * factor, middle = at !== null && at >= from && at <= to ? at : (from + to) / 2; look(middle - span / 2, middle + span / 2); }
  function move(part) { var by = Math.max(-from, Math.min(whole - to, part * (to - from))); look(from + by, to + by); }

  function point(x, y) {
    var shown = at !== null && at >= from && at <= to;
    places.forEach(function (place) { place.cursor.hidden = !shown; if (shown) place.cursor.style.left = 100 * (at - from) / (to - from) + "%"; });
    tip.hidden = !shown || drag !== null;
    if (tip.hidden) return;
    var near = (to - from) / 100, lines = [[words(at, Math.min(data.window, to - from) / 10)]];
    data.moments.forEach(function (one) { if (Math.abs(one[0] - at) < near) lines.push([one[1], "violation"]); });
    data.spans.forEach(function (span) { if (span[0] <= at && at < span[1]) lines.push([span[2]]); });
    (data.windows[Math.min(data.windows.length - 1, Math.floor(at / data.window))] || []).forEach(function (line) { lines.push([line]); });
    (data.metrics.lines[Math.floor(at / data.metrics.window)] || []).forEach(function (line) { lines.push([line]); });
    tip.textContent = "";
    lines.slice(0, 20).forEach(function (line) { var p = document.createElement("p"); p.textContent = line[0]; p.className = line[1] || ""; tip.appendChild(p); });
    var box = figure.getBoundingClientRect(), chart = first.getBoundingClientRect();
    if (x === undefined) { x = chart.left + (at - from) / (to - from) * chart.width; y = chart.top; }
    var left = x - box.left + 14;
    if (left + tip.offsetWidth > box.width) left = x - box.left - tip.offsetWidth - 14;
    tip.style.left = Math.max(0, Math.min(left, box.width - tip.offsetWidth)) + "px";
    tip.style.top = Math.max(0, Math.min(y - box.top + 18, box.height - tip.offsetHeight)) + "px";
  }
  function share(event) { var box = first.getBoundingClientRect(); return Math.max(0, Math.min(1, (event.clientX - box.left) / box.width)); }
  function select(from, to) {
    places.forEach(function (place) {
      place.selection.hidden = from === to;
      place.selection.style.left = 100 * Math.min(from, to) + "%";
      place.selection.style.width = 100 * Math.abs(to - from) + "%";
    });
  }
  function endDrag() { drag = null; select(0, 0); }

  figure.addEventListener("pointermove", function (event) {
    if (drag === null && !event.target.closest(".drawing")) { if (event.pointerType === "mouse") { at = null; point(); } return; }
    at = from + share(event) * (to - from);
    if (drag !== null) select(drag, Math.abs(share(event) - drag) * first.clientWidth < 6 ? drag : share(event));
    point(event.clientX, event.clientY);
  });
  figure.addEventListener("pointerdown", function (event) {
    if (event.button || !event.target.closest(".drawing")) return;
    drag = share(event);
    if (figure.setPointerCapture) figure.setPointerCapture(event.pointerId);
  });
  figure.addEventListener("pointerup", function (event) {
    if (drag === null) return;
    var begun = from + drag * (to - from), ended = from + share(event) * (to - from), far = Math.abs(share(event) - drag) * first.clientWidth >= 6;
    endDrag();
    at = ended;
    if (far) look(Math.min(begun, ended), Math.max(begun, ended));
    point(event.clientX, event.clientY);
  });
  figure.addEventListener("pointercancel", function () { endDrag(); point(); });
  figure.addEventListener("pointerleave", function (event) { if (event.pointerType === "mouse" && drag === null) { at = null; point(); } });
  figure.addEventListener("dblclick", function (event) { if (event.target.closest(".drawing")) look(0, whole); });
  zoom.addEventListener("click", function (event) { var button = event.target.closest("[data-zoom]"); if (button) act(button.getAttribute("data-zoom")); });
  figure.addEventListener("keydown", function (event) {
    var name = { "+": "in", "=": "in", "-": "out", Escape: "whole" }[event.key], way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey || (!name && !way)) return;
    event.preventDefault();
    if (name) { act(name); return; }
    var step = Math.min(data.window, (to - from) / 20);
    at = at === null ? from : Math.max(0, Math.min(whole, at + way * step));
    if (at < from || at > to) move(way / 2); else point();
  });
  function act(name) {
    if (name === "in") scale(0.5); else if (name === "out") scale(2);
    else if (name === "earlier") move(-0.5); else if (name === "later") move(0.5);
    else { at = null; look(0, whole); }
  }

  list(".vertical, .tick").forEach(function (original) { original.classList.add("whole"); });
  figure.classList.add("scripted");
  figure.tabIndex = 0;
  zoom.hidden = false;
  window.addEventListener("resize", redraw);
  redraw();
})();
