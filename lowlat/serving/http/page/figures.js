// The figures next to the chat: of this answer, and of the server.

import { find, make } from "./elements.js";

export class Meter {
  constructor() {
    this.begun = performance.now();
    this.first = 0;
    this.tokens = 0;
    this.steps = 0;
  }
  take(event) {
    const count = event.lowlat?.token_ids?.length || 0;
    const now = performance.now();
    if (count && !this.first) {
      this.first = now;
      find("ttft").textContent = (now - this.begun).toFixed(1) + " ms";
    } else if (count) {
      find("speed").textContent = (this.tokens / (now - this.first) * 1000).toFixed(1);
    }
    this.tokens += count;
    this.steps += count ? 1 : 0;
    find("count").textContent = String(this.tokens);
    const metrics = event.lowlat?.metrics;
    if (metrics?.num_steps) find("per-step").textContent = (metrics.completion_tokens / metrics.num_steps).toFixed(2);
    else if (this.steps) find("per-step").textContent = (this.tokens / this.steps).toFixed(2);
  }
}

export function resetFigures() {
  for (const id of ["ttft", "speed", "count", "per-step"]) find(id).textContent = "–";
}

function bar(name, share, value) {
  const row = make("div", "bar");
  const track = make("span", "track");
  const fill = make("div", "fill");
  fill.style.width = Math.round(100 * Math.min(1, share)) + "%";
  track.append(fill);
  row.append(make("span", "name", name), track, make("span", "value", value));
  return row;
}

export function showFigures({ stats }) {
  const engine = stats.engine || {};
  find("server-speed").textContent = stats.tokens_per_s.toFixed(1);
  find("waiting").textContent = `${stats.num_waiting} of ${stats.max_queue}`;
  const slots = new Map((engine.slots || []).map((slot) => [slot.slot, slot]));
  find("slots").replaceChildren(...Array.from({ length: stats.num_slots }, (_, number) => {
    const slot = slots.get(number);
    return slot
      ? bar(String(number), slot.completion_tokens / slot.max_tokens, String(slot.completion_tokens))
      : bar(String(number), 0, "free");
  }));
  const speculation = engine.eagle_speculation;
  if (!speculation) return;
  const rows = speculation.acceptance_by_position
    .map((share, place) => [share, speculation.drafted_by_position[place], place + 1])
    .filter(([, drafted]) => drafted)
    .map(([share, , position]) => bar(String(position), share, Math.round(100 * share) + " %"));
  if (rows.length) find("acceptance").replaceChildren(...rows);
}
