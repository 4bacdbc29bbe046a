// Six languages as highlight.js has them. JavaScript, the languages like C, and SQL have short grammars of our own:
// highlight.js's have 14 kB, a seventh of all that a browser may load.
import hljs from "highlight.js/lib/core";
import bash from "highlight.js/lib/languages/bash";
import diff from "highlight.js/lib/languages/diff";
import json from "highlight.js/lib/languages/json";
import python from "highlight.js/lib/languages/python";
import xml from "highlight.js/lib/languages/xml";
import yaml from "highlight.js/lib/languages/yaml";

const KEYWORDS = `abstract as async auto await bool boolean break byte case catch chan char class const constexpr continue default
  defer delete do double dyn else enum explicit export extends extern final finally float fn for foreach friend from func fun function
  go goto guard if impl implements import in inline instanceof int interface internal is lateinit let long loop match mod mut mutable
  namespace new object of open operator out override package params private protected public pub range readonly record ref register
  return sealed select self short signed sizeof static str string struct super suspend switch template this throw throws trait
  try type typedef typename typeof uint union unsafe unsigned use using val var virtual void volatile when where while yield`;
const LIKE_C = ["c", "h", "cpp", "c++", "cc", "hpp", "cs", "csharp", "go", "golang", "java", "kotlin", "kt", "rs", "rust", "scala",
  "swift", "zig"];
const LIKE_JAVASCRIPT = ["js", "jsx", "mjs", "ts", "tsx", "typescript", "css", "dart", "php", "scss"];
const SQL = `add all alter and any as asc begin between by cascade case cast check column commit constraint create cross database
  default delete desc distinct drop else end except exists explain foreign from full grant group having if in index inner insert
  intersect into is join key lateral left like limit natural not null offset on or order outer over partition primary recursive
  references returning revoke right rollback select set table then to transaction union unique update using values view when
  where window with`;

const CHARACTER = /'(\\[^'\n]{1,9}|[^'\\\n])'/; // not the ' of a lifetime in Rust
const QUOTED = /'(\\.|[^'\\\n])*'/;

const likeC = (quoted) => (it) => ({
  keywords: { keyword: KEYWORDS, literal: "true false null nil nullptr None undefined" },
  contains: [
    it.C_LINE_COMMENT_MODE,
    it.C_BLOCK_COMMENT_MODE,
    it.QUOTE_STRING_MODE,
    { scope: "string", begin: quoted },
    { scope: "string", begin: "`", end: "`" },
    { scope: "meta", begin: /^\s*#\s*[a-z]+|#!?\[[^\]\n]*\]|@[A-Za-z]\w*/ },
    { scope: "number", begin: /\b(0[xb][\da-f_]+|\d[\d_]*(\.[\d_]+)?(e[+-]?\d+)?)\w*/i },
    { scope: "title.function", begin: /\b(?!(?:if|for|while|switch|catch|return|sizeof|match)\b)[A-Za-z_]\w*(?=!?\()/ },
    { scope: "type", begin: /\b[A-Z]\w*\b/ },
  ],
});

const sql = (it) => ({
  case_insensitive: true,
  keywords: { keyword: SQL, type: "bigint blob boolean char date float int integer jsonb numeric real serial text timestamp uuid varchar" },
  contains: [
    it.COMMENT("--", "$"),
    it.C_BLOCK_COMMENT_MODE,
    { scope: "string", begin: "'", end: "'", contains: [{ begin: "''" }] },
    { scope: "number", begin: /\b\d+(\.\d+)?\b/ },
    { scope: "title.function", begin: /\b(avg|coalesce|count|date_trunc|lower|max|min|now|round|row_number|sum|upper)(?=\s*\()/ },
  ],
});

const languages = { bash, diff, json, python, xml, yaml, sql, clike: likeC(CHARACTER), javascript: likeC(QUOTED) };
for (const [name, language] of Object.entries(languages)) hljs.registerLanguage(name, language);
hljs.registerAliases(LIKE_C, { languageName: "clike" });
hljs.registerAliases(LIKE_JAVASCRIPT, { languageName: "javascript" });
export default hljs;
