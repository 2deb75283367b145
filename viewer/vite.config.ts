import { existsSync, readdirSync, readFileSync } from "node:fs";
import { svelte } from "@sveltejs/vite-plugin-svelte";
import { build, defineConfig, type Plugin } from "vite";

const PAGE = process.env["PAGE_DIR"] ?? "../src/rolltape/view/page";
const TARGET = "es2022";

// What ends up in the bundle, and the file with its licence; the texts are shipped beside it.
const BUNDLED: Record<string, string> = {
  "svelte": "LICENSE.md", "uplot": "LICENSE", "@fontsource-variable/geist": "LICENSE", "@fontsource-variable/geist-mono": "LICENSE",
  "markdown-it": "LICENSE", "mdurl": "LICENSE", "linkify-it": "LICENSE", "uc.micro": "LICENSE.txt", "entities": "LICENSE",
  "punycode.js": "LICENSE-MIT.txt", "highlight.js": "LICENSE",
};

/** A classic script runs from a server and from a file; a module does not load from a file. */
function classicScript(): Plugin {
  return {
    name: "classic-script",
    enforce: "post",
    transformIndexHtml: (html) => html.replace(/<script type="module" crossorigin/, "<script defer").replace(/ crossorigin/g, ""),
  };
}

/** A classic script `on-demand/NAME.js` from each `src/on-demand/NAME.ts`, which `src/ondemand.ts` loads when it is needed. */
function onDemand(): Plugin {
  const folder = "src/on-demand";
  return {
    name: "on-demand",
    apply: "build",
    async closeBundle() {
      for (const file of existsSync(folder) ? readdirSync(folder).sort() : []) {
        const name = file.replace(/\.ts$/, "");
        await build({
          configFile: false,
          logLevel: "warn",
          publicDir: false,
          build: {
            outDir: PAGE,
            emptyOutDir: false,
            target: TARGET,
            rollupOptions: {
              input: `${folder}/${file}`,
              preserveEntrySignatures: "strict",
              output: { format: "iife", name: `rolltape_${name}`, entryFileNames: `on-demand/${name}.js` },
            },
          },
        });
      }
    },
  };
}

function licences(): Plugin {
  return {
    name: "licences",
    generateBundle() {
      const parts = Object.entries(BUNDLED).map(([name, file]) => `${name}\n\n${readFileSync(`node_modules/${name}/${file}`, "utf8").trim()}\n`);
      this.emitFile({ type: "asset", fileName: "THIRD-PARTY.txt", source: parts.join("\n----\n\n") });
    },
  };
}

export default defineConfig({
  base: "./", // the server completes these addresses: the page may lie below a path
  plugins: [svelte(), classicScript(), licences(), onDemand()],
  build: {
    outDir: PAGE,
    emptyOutDir: true,
    target: TARGET,
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
