// Translates texts that stand on the page word for word, into the first of the browser's languages that
// has a table. Pieces that the server has filled with values arrive translated.
() => {
  const tables = /* tables */ {};
  const nameOf = language => {
    const name = language.toLowerCase().replace('-', '_');
    if (name.startsWith('ja')) return 'ja_JP';
    return /^zh(_cn|_hans|_sg|$)/.test(name) ? 'zh_CN' : '';
  };
  const known = navigator.languages.find(one => tables[nameOf(one)] || one.toLowerCase().startsWith('en'));
  const table = known && tables[nameOf(known)];
  if (!table) return;
  document.documentElement.lang = known;

  const translated = text => {
    const key = text.trim();
    return Object.hasOwn(table, key) ? text.replace(key, () => table[key]) : text;
  };
  const translate = root => {
    if (root.nodeType === Node.TEXT_NODE) {
      const text = translated(root.data);
      if (text !== root.data) root.data = text;
      return;
    }
    if (root.nodeType !== Node.ELEMENT_NODE || root.matches('script, style, textarea')) return;
    if (root.placeholder) root.placeholder = translated(root.placeholder);
    root.childNodes.forEach(translate);
  };
  translate(document.body);
  new MutationObserver(changes => {
    for (const change of changes) {
      if (change.type === 'characterData') translate(change.target);
      else change.addedNodes.forEach(translate);
    }
  }).observe(document.body, {childList: true, characterData: true, subtree: true});
}
