// What the site's own search finds, best first: a JSON object of lists of addresses, by question.
//
//     node ask_site.js SEARCH_WORKER.js SEARCH_INDEX.json QUESTION...
//
// The worker is the one that runs in a reader's browser; here it hears and speaks through globals.
const fs = require("fs");
const [worker, index, ...questions] = process.argv.slice(2);
const answers = [];
let hear;
globalThis.self = globalThis;
globalThis.addEventListener = (_, listener) => (hear = listener);
globalThis.postMessage = (message) => answers.push(message);
(0, eval)(fs.readFileSync(worker, "utf8"));
(async () => {
  const data = { ...JSON.parse(fs.readFileSync(index, "utf8")), options: { suggest: false } };
  await hear({ data: { type: 0, data } });
  const found = {};
  for (const question of questions) {
    await hear({ data: { type: 2, data: question } });
    found[question] = answers.at(-1).data.items.map((item) => item[0].location);
  }
  console.log(JSON.stringify(found));
})();
