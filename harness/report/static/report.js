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
