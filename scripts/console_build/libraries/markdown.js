export { Marked, Lexer, Parser, marked } from "marked";
export { default as DOMPurify } from "dompurify";
