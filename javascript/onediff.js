// Keeps OneDiff's status line current. Gradio 3.41 has no cheap timer: while the page is visible,
// this script clicks a hidden button that returns the status as HTML.
(function() {
    const FAST_MS = 2500; // while OneDiff is on
    const SLOW_MS = 10000; // off
    let last = 0;

    function visibleTab() {
        for (const tab of ['txt2img', 'img2img']) {
            const header = gradioApp().querySelector(`#onediff_${tab}`);
            if (header && header.offsetParent !== null) return tab;
        }
        return null;
    }

    function tick() {
        if (document.hidden) return;
        const tab = visibleTab();
        if (tab === null) return;
        const line = gradioApp().querySelector(`#onediff_${tab} .onediff-status`);
        const pause = line && line.dataset.state === 'off' ? SLOW_MS : FAST_MS;
        if (Date.now() - last < pause) return;
        last = Date.now();
        const button = gradioApp().querySelector(`#onediff_${tab}_refresh`);
        if (button) button.click();
    }

    onUiLoaded(function() {
        setInterval(tick, 1000);
    });
})();
