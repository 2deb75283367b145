import { mount } from "svelte";
import "./styles/fonts.css";
import "./styles/theme.css";
import "./styles/base.css";
import "uplot/dist/uPlot.min.css";
import App from "./App.svelte";

const target = document.getElementById("app");
if (target) mount(App, { target });
