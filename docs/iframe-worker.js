// Lets the search run when the site is opened from a folder: there browsers start no worker, so it works in a hidden
// frame. Stands for the script that the theme's offline plugin would fetch from another host; the theme's search looks
// for the name IFrameWorker in the page around it.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const src = String(url).replaceAll("&", "&amp;").replaceAll('"', "&quot;")
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      // of the worker's own functions it uses postMessage; the frame's would speak to itself
      this.frame.srcdoc =
        '<script>postMessage = data => frameElement.dispatchEvent(new CustomEvent("said", { detail: data }))<' +
        `/script><script src="${src}"><` + "/script>"
      this.frame.addEventListener("said", event => {
        this.dispatchEvent(new MessageEvent("message", { data: event.detail }))
      })
      this.ready = new Promise(loaded => this.frame.addEventListener("load", loaded, { once: true }))
      document.body.appendChild(this.frame)
    }
    postMessage(data) {
      this.ready.then(() => {
        const frame = this.frame.contentWindow
        frame.dispatchEvent(new frame.MessageEvent("message", { data }))
      })
    }
    terminate() {
      this.frame.remove()
    }
  }
  window.Worker = window.IFrameWorker
}
