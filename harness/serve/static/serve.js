(function () {
  var filters = document.getElementById("filters");
  if (filters && filters.tagName === "FORM") {
    filters.addEventListener("change", function (event) {
      if (event.target.tagName === "SELECT") filters.submit();
    });
  }
  if (document.getElementById("started") && document.querySelector("#started .pill.running")) {
    setTimeout(function () { location.reload(); }, 2000);
  }
})();
