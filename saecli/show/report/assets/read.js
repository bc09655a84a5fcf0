// A page of `sae read`.

const data = JSON.parse(document.getElementById("data").textContent);
const view = document.getElementById("overview");
const shown = reading(data);
view.append(h("header", {}, h("h1", { tabindex: "-1" }, h("bdi", {}, data.run)), shown.heading), ...shown.body,
  h("footer", { class: "muted" }, "Written by ", h("code", {}, "sae read"), ".", shown.keys));
addEventListener("keydown", shown.onKey);
view.hidden = false;
shown.choose(shown.latents.size === 1 ? [...shown.latents.keys()][0] : null); // of --latent
