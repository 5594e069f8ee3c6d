(function () {
  var words = document.getElementById("words");
  var verdict = document.getElementById("verdict");
  var matching = document.getElementById("matching");
  var rows = Array.prototype.slice.call(document.querySelectorAll("#runs tr"));
  if (!words) return;
  var texts = rows.map(function (row) { return row.textContent.toLowerCase(); });
  function choose() {
    var wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
    var number = 0;
    rows.forEach(function (row, place) {
      var isMeant = (!verdict.value || row.getAttribute("data-verdict") === verdict.value) &&
        wanted.every(function (word) { return texts[place].indexOf(word) >= 0; });
      row.hidden = !isMeant;
      if (isMeant) number += 1;
    });
    matching.textContent = number === rows.length ? "" : number + " of " + rows.length;
  }
  words.addEventListener("input", choose);
  verdict.addEventListener("change", choose);
  document.getElementById("filters").hidden = false;
  choose();
})();
