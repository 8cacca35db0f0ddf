// The panel as an anywidget: the default export is its factory.

export default () => ({
  render({ model, el: element }) {
    const waiting = new Map();
    const listeners = new Set();
    const name = Math.random().toString(36).slice(2); // several views of one widget get each other's answers
    let next = 0;
    const receive = (message) => {
      if (message?.kind === "answer" && waiting.has(message.id)) {
        waiting.get(message.id)(message.answer);
        waiting.delete(message.id);
      } else if (message?.kind === "changed") {
        for (const listener of listeners) listener(message);
      }
    };
    model.on("msg:custom", receive);
    const snapshot = model.get("snapshot");
    const unmount = mount(element, {
      live: true,
      controls: Boolean(snapshot?.controls),
      snapshot: typeof snapshot === "object" ? snapshot : null,
      subscribe: (listener) => { listeners.add(listener); return () => listeners.delete(listener); },
      request: (request) => new Promise((resolve) => {
        const id = `${name}-${next++}`;
        waiting.set(id, resolve);
        model.send({ kind: "request", id, request });
      }),
      remember: (state) => model.send({ kind: "remember", state }),
    });
    // plotly measures its place at a resize of the window only; the charts beside this panel were drawn before they had one
    let width = 0, told;
    const sized = new ResizeObserver(() => {
      if (element.clientWidth === width) return;
      width = element.clientWidth;
      window.dispatchEvent(new Event("resize"));
      clearTimeout(told);
      told = setTimeout(() => width > 0 && model.send({ kind: "width", width }), 300); // how many charts fit side by side
    });
    sized.observe(element);
    return () => {
      sized.disconnect();
      clearTimeout(told);
      model.off("msg:custom", receive);
      waiting.clear();
      listeners.clear();
      unmount();
    };
  },
});
