// The filter of the table: words anywhere in a row, `column:text`, and comparisons such as tokens>100 or grade:yes.

const COMPARES = {
  ":": null,
  "=": (one, other) => one === other,
  ">": (one, other) => one > other,
  "<": (one, other) => one < other,
  ">=": (one, other) => one >= other,
  "<=": (one, other) => one <= other,
};

export const COLUMNS = [
  { key: "name", title: "Rollout", of: (row) => row.name },
  { key: "task", title: "Task", of: (row) => row.task },
  { key: "agent", title: "Agent", of: (row) => row.agent },
  { key: "model", title: "Model", of: (row) => row.model },
  { key: "reward", title: "Reward", number: true, of: (row) => row.reward },
  { key: "advantage", title: "Advantage", short: "Adv.", number: true, of: (row) => row.advantage },
  { key: "outcome", title: "Outcome", of: (row) => (row.gone ? "gone" : row.outcome) },
  { key: "calls", title: "Calls", number: true, of: (row) => row.all_calls },
  { key: "complete", title: "Complete", number: true, of: (row) => row.complete },
  { key: "threads", title: "Sequences", number: true, short: "Seq.", of: (row) => row.threads },
  { key: "breaks", title: "Breaks", number: true, of: (row) => row.breaks },
  { key: "grade", title: "Training-grade", short: "Grade", of: (row) => gradeOf(row) },
  { key: "tokens", title: "Tokens sampled", short: "Tokens", number: true, of: (row) => row.tokens },
  { key: "time", title: "Time", number: true, of: (row) => row.seconds },
];

export function gradeOf(row) {
  if (row.grade === undefined) return row.gone ? "unknown" : "reading";
  return row.grade ? "yes" : "no";
}

// A function row -> whether it is wanted; `wrong` names a column that there is not.
export function filterOf(text) {
  const tests = [];
  let wrong = null;
  for (const word of text.match(/[^\s:<>=]*[:<>=]+"[^"]*"|"[^"]*"|\S+/g) || []) {
    const parts = /^(-?)([a-z]+)(:|>=|<=|>|<|=)(.*)$/i.exec(word);
    const column = parts && COLUMNS.find((one) => one.key === parts[2].toLowerCase());
    if (column && parts[4] !== "") tests.push(testOf(column, parts[3], bare(parts[4]), parts[1] === "-"));
    else if (parts && !column && parts[3] !== ":") wrong = parts[2];
    else if (!parts) tests.push(anywhere(bare(word)));
    else if (!column) tests.push(anywhere(bare(word)));
  }
  return { wanted: (row) => tests.every((test) => test(row)), wrong, some: tests.length > 0 };
}

function testOf(column, how, text, not) {
  const compare = COMPARES[how];
  const wanted = text.toLowerCase();
  const number = Number(text);
  return (row) => {
    const value = column.of(row);
    let met;
    if (compare && column.number) met = value !== null && value !== undefined && compare(value, number);
    else if (column.number) met = wanted === "none" ? value === null || value === undefined : value === number;
    else if (how === "=") met = String(value ?? "").toLowerCase() === wanted;
    else met = String(value ?? "").toLowerCase().includes(wanted);
    return met !== not;
  };
}

function anywhere(text) {
  const wanted = text.toLowerCase();
  return (row) => [row.name, row.path, row.task, row.agent, row.model, row.outcome, row.reason, row.error]
    .some((value) => value && value.toLowerCase().includes(wanted));
}

function bare(text) {
  return text.replace(/^"|"$/g, "");
}

// Puts rows in order by a column; what is not known comes last either way.
export function sorted(rows, key, falling) {
  const column = COLUMNS.find((one) => one.key === key);
  if (!column) return rows;
  const way = falling ? -1 : 1;
  return [...rows].sort((one, other) => {
    const a = column.of(one);
    const b = column.of(other);
    const none = (a === null || a === undefined) - (b === null || b === undefined);
    if (none) return none;
    if (a === b || (a ?? null) === (b ?? null)) return one.path < other.path ? -1 : 1;
    return (typeof a === "number" ? a - b : String(a).localeCompare(String(b))) * way;
  });
}
