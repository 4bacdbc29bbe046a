// Copies a text, and shows at the button that it did.
export async function copyText(text, button) {
  if (navigator.clipboard) await navigator.clipboard.writeText(text);
  else copySelected(text); // a page over plain HTTP, from another machine
  button.classList.add("copied");
  setTimeout(() => button.classList.remove("copied"), 1500);
}

function copySelected(text) {
  const field = document.body.appendChild(document.createElement("textarea"));
  field.value = text;
  field.select();
  document.execCommand("copy");
  field.remove();
}
