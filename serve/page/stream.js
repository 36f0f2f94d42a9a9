// The server's events, one after another. Every failure is an Error whose message is a sentence for users.

export const jsonHeaders = (key) => ({ "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) });

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function refusal(response) {
  let message = "";
  try {
    message = (await response.json()).error.message;
  } catch {
    // not an answer of this server; perhaps a proxy's
  }
  return new Refused(response.status, message || `The server answered with status ${response.status}.`);
}

// Yields the events of POST /playground/generate. The last one has a finish_reason, or this throws.
export async function* generate(body, key, signal) {
  let response;
  try {
    response = await fetch("/playground/generate", { method: "POST", headers: jsonHeaders(key), body: JSON.stringify(body), signal });
  } catch (error) {
    throw signal.aborted ? error : new Error("The server cannot be reached. Is it running?");
  }
  if (!response.ok) throw await refusal(response);
  let finished = false;
  for await (const data of lines(response.body, signal)) {
    const event = JSON.parse(data);
    if (event.error) throw new Error(event.error.message);
    finished = event.finish_reason !== null;
    yield event;
  }
  if (!finished) throw new Error("The connection ended before the text was complete.");
}

async function* lines(stream, signal) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
    }
  } catch (error) {
    throw signal.aborted ? error : new Error("The connection was lost before the text was complete.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
