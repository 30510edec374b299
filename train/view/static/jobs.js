// The table of rollouts: sorted, filtered, in their groups; a long one holds only the rows that are seen.
import { html, hooks } from "view/base.js";
import { COLUMNS, filterOf, gradeOf, sorted } from "view/filter.js";
import { CoverageChart, RewardChart, TokenChart } from "view/charts.js";
import { count, many, reward, seconds, signed } from "view/format.js";
import { hrefOf } from "view/base.js";

const { useEffect, useMemo, useRef, useState } = hooks;
const ROW = 36;
const GROUP = 46;
const OVERSCAN = 10;
const FACETS = ["task", "agent", "model", "outcome", "grade"];

export function Jobs({ job, words, go }) {
  const text = words.q || "";
  const [picked, setPicked] = useState([]);
  const key = words.sort || "";
  const falling = words.falling === "1";
  const together = words.groups !== "0";
  const filter = useMemo(() => filterOf(text), [text]);
  const rows = useMemo(() => sorted(job.rows.filter(filter.wanted), key, falling), [job, filter, key, falling]);
  const search = useRef(null);
  useEffect(() => {
    const focus = (event) => {
      if (event.key === "/" && !/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) {
        event.preventDefault();
        search.current.focus();
      }
    };
    addEventListener("keydown", focus);
    return () => removeEventListener("keydown", focus);
  }, []);

  const filterBy = (told) => go({ ...words, q: told || undefined }, { replace: true });
  const sortBy = (column) => {
    const next = key === column ? (falling ? {} : { sort: column, falling: "1" }) : { sort: column };
    go({ ...words, sort: undefined, falling: undefined, ...next }, { replace: true });
  };
  const pick = (row) => setPicked((current) => {
    if (current.includes(row.path)) return current.filter((path) => path !== row.path);
    return [...current, row.path].slice(-2);
  });

  return html`<main class="jobs">
    <h1 class="sr">Rollouts of ${job.name}</h1>
    <section class="charts" aria-label="The rollouts at a glance">
      <${RewardChart} groups=${job.groups} rows=${rows} />
      <${TokenChart} rows=${rows} />
      <${CoverageChart} rows=${rows} />
    </section>
    <section class="bar" aria-label="Filter">
      <label class="search"><span class="sr">Filter rollouts</span>
        <input ref=${search} type="search" value=${text} placeholder="Filter: words, reward:1, tokens>100, grade:no  ( / )"
          spellcheck="false" autocomplete="off" onInput=${(event) => filterBy(event.target.value)} /></label>
      ${FACETS.map((facet) => html`<${Facet} facet=${facet} rows=${job.rows} text=${text} onPick=${filterBy} />`)}
      <label class="check"><input type="checkbox" checked=${together}
        onChange=${() => go({ ...words, groups: together ? "0" : undefined }, { replace: true })} /> groups</label>
      <span class="grow"></span>
      <span class="dim" role="status">${filter.wrong ? `There is no column ${filter.wrong}` : rows.length === job.rows.length ? many(rows.length, "rollout") : `${count(rows.length)} of ${many(job.rows.length, "rollout")}`}</span>
      ${picked.length === 2
        ? html`<a class="button primary" href=${hrefOf({ view: "compare", a: picked[0], b: picked[1] })}>Compare both</a>`
        : picked.length === 1 && html`<span class="dim">pick one more to compare</span>`}
    </section>
    <${Table} rows=${rows} groups=${together ? job.groups : null} groupBy=${job.group_by} sortKey=${key} falling=${falling}
      onSort=${sortBy} picked=${picked} onPick=${pick} many=${job.rows.length} />
  </main>`;
}

function Facet({ facet, rows, text, onPick }) {
  const column = COLUMNS.find((one) => one.key === facet);
  const values = useMemo(() => [...new Set(rows.map((row) => column.of(row) ?? "–"))].sort(), [rows]);
  if (values.length < 2) return null;
  const word = new RegExp(`(?:^|\\s)${facet}=("[^"]*"|\\S+)`);
  const found = word.exec(text);
  const chosen = found ? found[1].replace(/^"|"$/g, "") : "";
  return html`<label class="facet"><span class="sr">${column.title}</span><select value=${chosen} onChange=${(event) => {
    const rest = text.replace(word, "").trim();
    const value = event.target.value;
    onPick(value ? `${rest} ${facet}=${/\s/.test(value) ? `"${value}"` : value}`.trim() : rest);
  }}><option value="">${column.short || column.title}: all</option>
    ${values.slice(0, 200).map((value) => html`<option value=${value}>${value}</option>`)}</select></label>`;
}

function Table({ rows, groups, groupBy, sortKey, falling, onSort, picked, onPick }) {
  const items = useMemo(() => itemsOf(rows, groups), [rows, groups]);
  const box = useRef(null);
  const [seen, setSeen] = useState([0, 40]);
  const tops = useMemo(() => {
    const made = [0];
    for (const item of items) made.push(made[made.length - 1] + (item.group ? GROUP : ROW));
    return made;
  }, [items]);
  const look = () => {
    if (!box.current) return;
    const top = box.current.scrollTop;
    const bottom = top + box.current.clientHeight;
    let first = 0;
    while (first < items.length && tops[first + 1] < top) first += 1;
    let last = first;
    while (last < items.length && tops[last] < bottom) last += 1;
    const next = [Math.max(0, first - OVERSCAN), Math.min(items.length, last + OVERSCAN)];
    setSeen((current) => (current[0] === next[0] && current[1] === next[1] ? current : next));
  };
  useEffect(() => {
    look();
    const sizes = new ResizeObserver(look);
    sizes.observe(box.current);
    return () => sizes.disconnect();
  }, [items]);
  const press = (event) => {
    if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
    const links = [...box.current.querySelectorAll("a.name")];
    const at = links.indexOf(document.activeElement);
    const next = links[at + (event.key === "ArrowDown" ? 1 : -1)] || (at < 0 ? links[0] : null);
    if (next) {
      event.preventDefault();
      next.focus();
      next.scrollIntoView({ block: "nearest" });
    }
  };
  // What a group has in common stands in its line.
  const same = groups ? groupBy : [];
  const [first, last] = [Math.min(seen[0], items.length), Math.min(seen[1], items.length)];
  return html`<div class=${`table ${same.map((key) => `no-${key}`).join(" ")}`} ref=${box} onScroll=${look} onKeyDown=${press} tabindex="0" role="region" aria-label="Rollouts">
    <table aria-rowcount=${rows.length + 1}>
      <thead><tr>
        <th class="pick"><span class="sr">Compare</span></th>
        ${COLUMNS.map((column) => html`<th scope="col" class=${`c-${column.key} ${column.number ? "num" : ""}`}
          aria-sort=${sortKey === column.key ? (falling ? "descending" : "ascending") : "none"}>
          <button onClick=${() => onSort(column.key)} title=${`Sort by ${column.title.toLowerCase()}`}>${column.short || column.title}<span class="arrow" aria-hidden="true">${sortKey === column.key ? (falling ? "↓" : "↑") : ""}</span></button></th>`)}
      </tr></thead>
      <tbody>
        ${first > 0 && html`<tr class="spacer" aria-hidden="true"><td colspan=${COLUMNS.length + 1} style=${{ height: `${tops[first]}px` }}></td></tr>`}
        ${items.slice(first, last).map((item) => (item.group
          ? html`<${GroupRow} key=${`g${item.group.number}`} group=${item.group} shown=${item.shown} />`
          : html`<${Row} key=${item.row.path} row=${item.row} picked=${picked.includes(item.row.path)} onPick=${onPick} />`))}
        ${last < items.length && html`<tr class="spacer" aria-hidden="true"><td colspan=${COLUMNS.length + 1} style=${{ height: `${tops[items.length] - tops[last]}px` }}></td></tr>`}
      </tbody>
    </table>
    ${rows.length === 0 && html`<p class="empty">No rollout is as the filter wants it.</p>`}
  </div>`;
}

function itemsOf(rows, groups) {
  if (!groups) return rows.map((row) => ({ row }));
  const byGroup = new Map();
  for (const row of rows) {
    const number = row.group ?? -1;
    if (!byGroup.has(number)) byGroup.set(number, []);
    byGroup.get(number).push(row);
  }
  const items = [];
  for (const [number, members] of byGroup) {
    const group = groups[number];
    if (group) items.push({ group, shown: members.length });
    else if (byGroup.size > 1) items.push({ group: { number, id: "not finished", key: {}, members: [], rewards: [] }, shown: members.length });
    items.push(...members.map((row) => ({ row })));
  }
  return items;
}

function GroupRow({ group, shown }) {
  const name = Object.values(group.key).filter(Boolean).join(" · ") || "In no group: still running, or the calls of a proxy";
  return html`<tr class="group"><td colspan=${COLUMNS.length + 1}>
    <div class="group-line">
      <b>${name}</b>
      <span class="dim">${shown === group.members.length || !group.members.length ? many(shown, "rollout") : `${shown} of ${group.members.length}`}</span>
      ${group.mean !== null && group.mean !== undefined && html`<span class="num">mean ${reward(group.mean)} <span class="dim">± ${reward(group.std)}</span></span>`}
      ${group.withheld
        ? html`<span class="tag bad" title=${group.withheld_detail}>withheld: ${group.withheld.replaceAll("_", " ")}</span><span class="why dim" title=${group.withheld_detail}>${group.withheld_detail}</span>`
        : group.members.length > 0 && !group.judged && html`<span class="dim">logs being read</span>`}
    </div></td></tr>`;
}

function Row({ row, picked, onPick }) {
  const grade = gradeOf(row);
  const link = hrefOf({ view: "rollout", path: row.path });
  return html`<tr class=${`${picked ? "picked" : ""} ${row.gone ? "gone" : ""}`}>
    <td class="pick"><input type="checkbox" checked=${picked} onChange=${() => onPick(row)} aria-label=${`Pick ${row.path} to compare`} /></td>
    <td class="c-name"><a class="name" href=${link} title=${row.path}>${named(row.name)}</a>${row.job !== row.name && row.path !== row.name && html`<span class="job dim">${row.job}</span>`}</td>
    <td class="c-task">${row.task || "–"}</td>
    <td class="c-agent">${row.agent || "–"}</td>
    <td class="c-model" title=${row.model}>${row.model || "–"}</td>
    <td class="c-reward num"><${Reward} value=${row.reward} /></td>
    <td class="c-advantage num">${signed(row.advantage)}</td>
    <td class="c-outcome"><span class=${`outcome ${row.outcome}`} title=${row.error || ""}>${row.gone ? "folder gone" : row.outcome.replaceAll("_", " ")}</span></td>
    <td class="c-calls num">${count(row.all_calls)}</td>
    <td class="c-complete num">${row.complete === undefined ? "–" : html`${row.complete}<span class="dim">/${row.calls}</span>`}</td>
    <td class="c-threads num">${count(row.threads)}</td>
    <td class="c-breaks num">${row.breaks ? html`<span class="breaks">${row.breaks}</span>` : row.breaks === 0 ? "0" : "–"}</td>
    <td class="c-grade"><span class=${`grade ${grade}`} title=${row.reason || ""}>${grade === "yes" ? "✓ yes" : grade === "no" ? "✕ no" : grade === "reading" ? "reading…" : grade}</span></td>
    <td class="c-tokens num">${count(row.tokens)}</td>
    <td class="c-time num">${seconds(row.seconds)}</td>
  </tr>`;
}

export function Reward({ value }) {
  if (value === null || value === undefined) return html`<span class="dim">–</span>`;
  return html`<span class=${`reward ${value >= 1 ? "good" : value > 0 ? "part" : "zero"}`}>${reward(value)}</span>`;
}

// `<task>__<8 digits>`: on a narrow screen the digits tell rollouts apart, the task is the group's.
function named(name) {
  const found = /^(.+__)([0-9a-f]{6,})$/.exec(name);
  return found ? html`<span class="stem">${found[1]}</span>${found[2]}` : name;
}
