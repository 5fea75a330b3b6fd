// Keeps OneDiff's header current, fills the graph library when its accordion opens, and lets keys open
// accordions. Gradio 3.41 has no cheap timer, no event for accordions, and opens them by mouse only.
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

    function press(id) {
        const button = gradioApp().querySelector(`#${id}`);
        if (button) button.click();
    }

    function tick() {
        if (document.hidden) return;
        const tab = visibleTab();
        if (tab === null) return;
        const line = gradioApp().querySelector(`#onediff_${tab} .onediff-status`);
        const pause = line && line.dataset.state === 'off' ? SLOW_MS : FAST_MS;
        if (Date.now() - last < pause) return;
        last = Date.now();
        press(`onediff_${tab}_refresh`);
    }

    function fillLibrary(event) {
        const head = event.target.closest('[id^="onediff_"][id$="_library"] > .label-wrap');
        if (head) press(`${head.parentElement.id}_refresh`);
    }

    function isPlainHead(element) {
        return element.matches('[id^="onediff_"] > .label-wrap') && element.tagName !== 'BUTTON';
    }

    function openByKey(event) {
        if ((event.key !== 'Enter' && event.key !== ' ') || !isPlainHead(event.target)) return;
        event.preventDefault();
        event.target.click();
    }

    function tellKeyboards() {
        for (const head of gradioApp().querySelectorAll('[id^="onediff_"] > .label-wrap')) {
            if (!isPlainHead(head)) continue;
            head.tabIndex = 0;
            head.setAttribute('role', 'button');
        }
    }

    onUiLoaded(function() {
        setInterval(tick, 1000);
        gradioApp().addEventListener('click', fillLibrary);
        gradioApp().addEventListener('keydown', openByKey);
        tellKeyboards();
    });
})();
