// The page's look. In JupyterLab its own variables rule, elsewhere the reader's light or dark.

export const STYLE = `
.oomb-timeline {
  --ink: var(--jp-ui-font-color1, #1d2127);
  --soft: var(--jp-ui-font-color2, #646b76);
  --faint: var(--jp-border-color2, #dfe3e8);
  --ground: var(--jp-layout-color1, #ffffff);
  --raised: var(--jp-layout-color2, #f4f5f7);
  --wait: #c8323a;
  box-sizing: border-box; color: var(--ink); background: var(--ground);
  font: 13px/1.45 var(--jp-ui-font-family, system-ui, -apple-system, "Segoe UI", sans-serif);
  font-variant-numeric: tabular-nums; position: relative;
}
@media (prefers-color-scheme: dark) {
  .oomb-timeline {
    --ink: var(--jp-ui-font-color1, #e8eaed); --soft: var(--jp-ui-font-color2, #9ba3af);
    --faint: var(--jp-border-color2, #30353d); --ground: var(--jp-layout-color1, #16181c);
    --raised: var(--jp-layout-color2, #1f2227); --wait: #f0757b;
  }
}
body[data-jp-theme-light="false"] .oomb-timeline { --wait: #f0757b; }
body[data-jp-theme-light="true"] .oomb-timeline { --wait: #c8323a; }
.oomb-timeline *, .oomb-timeline *::before { box-sizing: border-box; }
.oomb-timeline header { display: flex; flex-wrap: wrap; align-items: center; gap: 6px 10px; margin-bottom: 10px; }
.oomb-timeline h1 { font-size: 16px; font-weight: 600; margin: 0; }
.oomb-timeline .badge { font-size: 12px; padding: 1px 8px; border-radius: 10px; background: var(--raised); border: 1px solid var(--faint); color: var(--soft); }
.oomb-timeline .tools { margin-left: auto; display: flex; gap: 4px; align-items: center; }
.oomb-timeline button, .oomb-timeline select { font: inherit; font-size: 12px; color: var(--ink); background: var(--raised); border: 1px solid var(--faint); border-radius: 5px; padding: 2px 9px; cursor: pointer; min-height: 26px; }
.oomb-timeline button:hover { border-color: var(--soft); }
.oomb-timeline button:focus-visible, .oomb-timeline select:focus-visible, .oomb-timeline canvas:focus-visible { outline: 2px solid #3f86e0; outline-offset: 2px; }
.oomb-timeline button:disabled { opacity: 0.45; cursor: default; }
.oomb-timeline .figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(128px, 1fr)); gap: 1px; margin: 0 0 12px; background: var(--faint); border: 1px solid var(--faint); border-radius: 8px; overflow: hidden; }
.oomb-timeline .figures > div { background: var(--ground); padding: 8px 12px; display: flex; flex-direction: column; }
.oomb-timeline dt { font-size: 12px; color: var(--soft); }
.oomb-timeline dd { margin: 0; font-size: 19px; line-height: 1.3; font-weight: 600; white-space: nowrap; }
.oomb-timeline dd + dd { font-size: 12px; font-weight: 400; color: var(--soft); white-space: normal; }
.oomb-timeline .wait { color: var(--wait); }
.oomb-timeline canvas { display: block; width: 100%; border-radius: 3px; cursor: crosshair; touch-action: pan-y; }
.oomb-timeline .legend { display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: 12px; color: var(--soft); margin: 0 0 10px; padding: 0; list-style: none; }
.oomb-timeline .legend li { display: flex; align-items: center; gap: 6px; }
.oomb-timeline .swatch { width: 14px; height: 12px; border-radius: 2px; flex: none; display: inline-block; }
.oomb-timeline .swatch.hatched { background-image: repeating-linear-gradient(135deg, transparent 0 3px, var(--ground) 3px 4.5px); }
.oomb-timeline .swatch.gap { background: color-mix(in srgb, var(--swatch) 16%, transparent) !important; border: 1.5px solid var(--swatch); }
.oomb-timeline .sentence { min-height: 2.9em; margin: 10px 0 8px; }
.oomb-timeline .tip { position: absolute; z-index: 5; pointer-events: none; max-width: 320px; padding: 6px 9px; background: var(--ground); border: 1px solid var(--soft); border-radius: 6px; font-size: 12px; box-shadow: 0 3px 14px #0003; }
.oomb-timeline .tip b { display: block; }
.oomb-timeline .tip .place, .oomb-timeline .tip .note { color: var(--soft); display: block; }
.oomb-timeline table { border-collapse: collapse; width: 100%; font-size: 12.5px; }
.oomb-timeline caption { text-align: left; color: var(--soft); padding-bottom: 4px; font-size: 12px; }
.oomb-timeline th { font-weight: 500; color: var(--soft); text-align: right; padding: 3px 10px; border-bottom: 1px solid var(--faint); }
.oomb-timeline td { text-align: right; padding: 3px 10px; border-bottom: 1px solid var(--faint); white-space: nowrap; }
.oomb-timeline th:first-child, .oomb-timeline td:first-child { text-align: left; padding-left: 2px; }
.oomb-timeline td .swatch { margin-right: 7px; vertical-align: -1px; }
.oomb-timeline .help { position: absolute; inset: 0; z-index: 6; display: grid; place-items: start center; padding-top: 90px; background: color-mix(in srgb, var(--ground) 70%, transparent); }
.oomb-timeline .help[hidden], .oomb-timeline .tip[hidden] { display: none; }
.oomb-timeline .help > div { background: var(--ground); border: 1px solid var(--soft); border-radius: 8px; padding: 14px 20px; box-shadow: 0 6px 30px #0004; }
.oomb-timeline .help h2 { margin: 0 0 8px; font-size: 14px; font-weight: 600; }
.oomb-timeline .help dl { display: grid; grid-template-columns: auto auto; gap: 3px 16px; margin: 0; }
.oomb-timeline .help dt { font-size: 12.5px; color: var(--ink); }
.oomb-timeline .help dd, .oomb-timeline .help dd + dd { font-size: 12.5px; font-weight: 400; color: var(--soft); }
.oomb-timeline kbd { font: inherit; font-size: 12px; padding: 0 5px; border: 1px solid var(--faint); border-radius: 4px; background: var(--raised); }
.oomb-timeline .failed { color: var(--wait); }
`;
