// A report's pages, opened from disk: the part of the address after # says which is shown.

const data = JSON.parse(document.getElementById("data").textContent);
const views = { overview: document.getElementById("overview"), latent: document.getElementById("latent") };
const files = new Map(); // by number: a promise of the file's content
const waiting = new Map();

// Each data file calls this. A page from disk may run scripts that lie beside it, but not read files.
window.saeLatents = (file, content) => waiting.get(file)?.(content);

function load(file) {
  if (!files.has(file)) {
    files.set(file, new Promise((resolve, reject) => {
      const name = `latents/${`${file}`.padStart(5, "0")}.js`;
      const script = h("script", { src: name, onload: () => { script.remove(); reject(new Error(`${name} is damaged`)); },
        onerror: () => {
          script.remove();
          files.delete(file);
          reject(new Error(`${name} cannot be loaded; it has to lie beside index.html`));
        } });
      waiting.set(file, resolve);
      document.head.append(script);
    }));
  }
  return files.get(file);
}

const link = ({ view, latent }) => (view === "latent" ? `#latent/${latent}` : "#");
const pages = latentPages(data, views, (latent, place) => load(Math.floor(place / data.latents.per_file)));
const route = () => pages.show(/^#latent\/\d+$/.test(location.hash) ? Number(location.hash.slice(8)) : null);
addEventListener("keydown", pages.onKey);
addEventListener("hashchange", route);
route();
