// Asking again and again, as long as somebody looks: not in a hidden tab, not while paused.
import { useEffect, useRef, useState } from "../ui.js";

const MAX_WAIT_MS = 30_000;

/** What `load(signal)` gave last, and what it failed with since. It is called each `everyMs`; 0 is once. */
export function usePolled(load, everyMs, depends = []) {
  const [state, setState] = useState({ data: null, error: null });
  const again = useRef(() => {});
  useEffect(() => {
    const leaving = new AbortController();
    let timer = 0;
    let running = false;
    let isStale = false;
    let failures = 0;
    const look = async () => {
      clearTimeout(timer);
      isStale = running;
      if (running || leaving.signal.aborted || document.hidden) return;
      running = true;
      try {
        const data = await load(leaving.signal);
        failures = 0;
        if (!leaving.signal.aborted) setState({ data, error: null });
      } catch (error) {
        failures += 1;
        if (!leaving.signal.aborted) setState((old) => ({ data: old.data, error }));
      }
      running = false;
      if (isStale) look(); // what was asked for may be older than why it was asked for again
      else if (everyMs && !leaving.signal.aborted) {
        timer = setTimeout(look, Math.min(everyMs * 2 ** Math.min(failures, 5), Math.max(MAX_WAIT_MS, everyMs)));
      }
    };
    again.current = look;
    if (everyMs) document.addEventListener("visibilitychange", look);
    look();
    return () => {
      leaving.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", look);
    };
  }, [everyMs, ...depends]);
  return { ...state, again: () => again.current() };
}
