// The home's runs, and the training curves of one, which grow while it is trained.

const EVERY = 3000; // milliseconds between looks at a run that is trained

function runsTable(runs, chosen) {
  const heads = ["run", "state", "solver", "act", "latents", "data", "FVU", "L0"];
  const rows = runs.map((run) => h("tr", { class: run.name === chosen ? "chosen" : "" },
    h("td", {}, h("a", { href: link({ view: "runs", name: run.name }) }, run.name)),
    [run.state, run.solver, run.act].map((word) => h("td", {}, word ?? "–")),
    h("td", { class: "figure" }, number(run.d_sae)), h("td", {}, run.data ?? "–"),
    [run.test_fvu, run.test_l0].map((value) => h("td", { class: "figure" }, number(value)))));
  return h("section", { class: "card latents listed" }, h("h2", {}, "Runs of the home"), runs.length ? h("table", {},
    h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))), h("tbody", {}, rows))
    : muted("There are none yet."));
}

function curvesCard({ run, lines }) {
  const points = (name) => lines.filter((line) => line[name] > 0).map((line) => [line.step, line[name]]);
  const batches = points("batch_fvu"), heldOut = points("test_fvu"), last = lines.at(-1);
  if (batches.length + heldOut.length < 2) return card(run, muted("It has not logged enough to draw."));
  const l0 = last.batch_l0 ?? last.test_l0;
  return card(run, curves("FVU in training, by step", "step; dots: held-out rows", batches, heldOut),
    muted(`step ${number(last.step)}, FVU ${number((batches.at(-1) ?? heldOut.at(-1))[1])}, L0 ${number(l0)}`));
}

async function runsView(view, state, isHere) {
  const curve = h("div", {}), table = h("div", {}), said = h("p", { class: "muted", role: "status" });
  let listed = "";
  const draw = async () => {
    const { runs } = await ask("runs", {}, true), name = state.name ?? runs[0]?.name;
    const logged = name && await ask("curves", { run: name }, true);
    if (!isHere()) return false;
    curve.replaceChildren(logged ? curvesCard(logged) : "");
    const listing = JSON.stringify(runs);
    if (listing !== listed) table.replaceChildren(runsTable(runs, name)); // otherwise the focus stays in it
    listed = listing;
    return !frozen && runs.find((run) => run.name === name)?.state === "unfinished";
  };
  const follow = async () => {
    let goesOn = true;
    try {
      goesOn = await draw();
      said.textContent = "";
    } catch (error) {
      said.textContent = error.message;
    }
    if (goesOn && isHere()) setTimeout(follow, EVERY);
  };
  const goesOn = await draw();
  if (!isHere()) return;
  view.replaceChildren(h("header", {}, h("h1", { tabindex: "-1" }, "Runs")), said, curve, table);
  if (goesOn) setTimeout(follow, EVERY);
}
