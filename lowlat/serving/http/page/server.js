// Requests to the gateway that this page came from, and what their failures are called.

const KEY = "lowlat key";
const AWAY = "nothing answers; trying again";

// Keep the key for this tab.
export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

// A new tab without a key gets it from one that has it; it is never kept for longer than the tabs are open.
export function shareKey(got) {
  const tabs = new BroadcastChannel(KEY);
  tabs.addEventListener("message", ({ data }) => {
    const own = sessionStorage.getItem(KEY);
    if (data.asks && own) tabs.postMessage({ key: own });
    if (!data.key || own) return;
    setKey(data.key);
    got();
  });
  if (!sessionStorage.getItem(KEY)) tabs.postMessage({ asks: true });
}

// An error; beside its message the words of the status line, `state`, and HTTP's status where there is one.
function problem(message, state = message, status = 0) {
  return Object.assign(new Error(message), { state, status });
}

// The answer to a request; one that is no success is an error.
export async function ask(path, body, signal) {
  const headers = { authorization: "Bearer " + (sessionStorage.getItem(KEY) || "") };
  if (body) headers["content-type"] = "application/json";
  const options = { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal };
  const answer = await fetch(path, options).catch((error) => {
    if (error.name === "AbortError") throw error;
    throw problem(`Nothing answers at ${location.host}. The page goes on trying; send again when it is back.`, AWAY);
  });
  if (!answer.ok) throw await refusal(answer);
  return answer;
}

async function refusal(answer) {
  const said = (await answer.json().catch(() => null))?.error?.message || "HTTP " + answer.status;
  const { status } = answer;
  if (status === 401) return problem("The key is wrong or missing: enter it above.", "needs the key", status);
  if (status === 503) return problem(`The model's server is away: ${said}`, "server away; trying again", status);
  if (status !== 429) return problem(said, "HTTP " + status, status);
  const seconds = Number(answer.headers.get("retry-after"));
  return problem(`The server is busy: ${said}. Send again${seconds ? ` in ${seconds} s` : " soon"}.`, "busy", status);
}

// The events of a stream, to its end.
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      return { done: true };
    });
    if (done) throw problem("The connection broke: the answer ends here.");
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      if (part.startsWith(":")) continue; // a comment: the answer is still to come
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw problem(event.error.message);
      yield event;
    }
  }
}
