(function () {
  var filters = document.getElementById("filters");
  if (filters && filters.tagName === "FORM") {
    filters.addEventListener("change", function (event) {
      if (event.target.tagName === "SELECT") filters.submit();
    });
  }
  document.querySelectorAll("#started pre").forEach(function (output) { output.scrollTop = output.scrollHeight; });
  if (document.getElementById("started") && document.querySelector("#started .pill.running")) {
    // Reload only if the server answers: else the browser's own error page would stay.
    var look = function () {
      fetch(location.href, { method: "HEAD", cache: "no-store" }).then(function () { location.reload(); }, function () {
        document.getElementById("lost").hidden = false;
        setTimeout(look, 2000);
      });
    };
    setTimeout(look, 2000);
  }
})();
