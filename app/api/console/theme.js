// Runs before the page is drawn, so that it is never drawn in the other theme.
try {
  document.documentElement.dataset.theme = localStorage.getItem("tokenring.theme") ?? "auto";
} catch {
  // Storage that is switched off: the system's theme.
}
