import { readFileSync } from "node:fs";
import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig, type Plugin } from "vite";

// What ends up in the bundle, and under which licence; shipped beside it.
const BUNDLED = ["svelte", "uplot", "@fontsource-variable/geist", "@fontsource-variable/geist-mono"];

/** One classic script: it runs from a server, inlined into an exported page, and from a file. */
function classicScript(): Plugin {
  return {
    name: "classic-script",
    enforce: "post",
    transformIndexHtml: (html) => html.replace(/<script type="module" crossorigin/, "<script defer").replace(/ crossorigin/g, ""),
  };
}

function licences(): Plugin {
  return {
    name: "licences",
    generateBundle() {
      const parts = BUNDLED.map((name) => {
        const file = name === "svelte" ? "LICENSE.md" : "LICENSE";
        return `${name}\n\n${readFileSync(`node_modules/${name}/${file}`, "utf8").trim()}\n`;
      });
      this.emitFile({ type: "asset", fileName: "THIRD-PARTY.txt", source: parts.join("\n----\n\n") });
    },
  };
}

export default defineConfig({
  plugins: [svelte(), classicScript(), licences()],
  build: {
    outDir: process.env["PAGE_DIR"] ?? "../src/rolltape/view/page",
    emptyOutDir: true,
    target: "es2022",
    cssTarget: ["chrome123", "firefox120", "safari17.5"], // those that know light-dark()
    modulePreload: false,
    cssCodeSplit: false,
    assetsInlineLimit: 0,
    reportCompressedSize: true,
    rollupOptions: {
      output: {
        format: "iife",
        entryFileNames: "app.js",
        assetFileNames: (asset) => (asset.names[0]?.endsWith(".woff2") ? "fonts/[name][extname]" : "app[extname]"),
      },
    },
  },
  server: { proxy: { "/api": process.env["VIEW_SERVER"] ?? "http://127.0.0.1:8765" } },
});
