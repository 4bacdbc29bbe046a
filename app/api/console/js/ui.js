// What every view is made of, from one place.
export * from "../vendor/ui.js";
