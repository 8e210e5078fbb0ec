// Browsers start no workers for pages that lie on the disk. There, a hidden frame runs the search's script instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.queue = [];
      this.onmessage = null;
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      window.addEventListener("message", (event) => {
        if (event.source === this.frame.contentWindow) this.receive(event.data);
      });
      document.body.append(this.frame);
      const inside = this.frame.contentDocument;
      inside.open();
      inside.write(
        "<script>postMessage = (data) => parent.postMessage(data, '*')<\/script>" +
          `<script src="${url}" onload="parent.postMessage('loaded', '*')"><\/script>`,
      );
      inside.close();
    }

    receive(data) {
      if (data === "loaded") {
        const waiting = this.queue;
        this.queue = null;
        waiting.forEach((message) => this.postMessage(message));
        return;
      }
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      if (this.onmessage) this.onmessage(event);
    }

    postMessage(data) {
      if (this.queue) this.queue.push(data);
      else this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data, source: window }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
