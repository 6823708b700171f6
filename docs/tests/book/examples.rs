//! Checks examples: configurations, API documents, API paths, and metric names.

use std::collections::BTreeSet;
use std::fs;

use riser_docs::page::Block;
use riser_docs::{Page, documents, root};
use riser_target::config::Config;
use walkdir::WalkDir;

use crate::all_right;

/// Returns all examples in this language, with their locations.
fn examples(language: &str) -> Vec<(String, Block)> {
    let pages = documents();
    let of = |page: Page| {
        let blocks = page.blocks().into_iter().filter(|b| b.language == language);
        let placed = blocks.map(|block| (page.place(block.line), block));
        placed.collect::<Vec<_>>()
    };
    pages.into_iter().flat_map(of).collect()
}

#[test]
fn configurations_are_valid() {
    let examples = examples("yaml");
    assert!(examples.len() >= 5);
    let wrong = examples.iter().filter_map(|(place, block)| {
        let error = Config::parse(&block.text, place).err()?;
        Some(error.to_string())
    });
    all_right(&wrong.collect::<Vec<_>>());
}

#[test]
fn json_is_well_formed() {
    let wrong = examples("json").into_iter().filter_map(|(place, block)| {
        let parsed = serde_json::from_str::<serde_json::Value>(&block.text);
        Some(format!("{place}: {}", parsed.err()?))
    });
    all_right(&wrong.collect::<Vec<_>>());
}

/// Returns the daemon's source code without its unit tests.
fn sources() -> String {
    let files = WalkDir::new(root().join("target/src")).into_iter();
    let files = files.map(|entry| entry.expect("sources can be read").into_path());
    let files = files.filter(|path| path.extension().is_some_and(|e| e == "rs"));
    files
        .map(|path| fs::read_to_string(path).expect("a source"))
        .collect()
}

/// Returns all string literals with this prefix that only consist of the given characters.
fn literals(text: &str, start: &str, is_part: impl Fn(char) -> bool) -> BTreeSet<String> {
    let strings = text.split('"');
    let strings = strings.filter(|s| s.starts_with(start) && s.chars().all(&is_part));
    strings.map(str::to_owned).collect()
}

#[test]
fn api_paths_exist_and_are_documented() {
    let is_part = |c: char| c.is_ascii_lowercase() || "/-0123456789".contains(c);
    let mut paths = BTreeSet::new();
    for route in sources().split(".route(").skip(1) {
        paths.extend(route.split('"').nth(1).map(str::to_owned));
    }
    let is_described = |path: &&String| path.starts_with("/v1/");
    assert!(paths.iter().filter(is_described).count() >= 10, "{paths:?}");
    let mut described = BTreeSet::new();
    let mut wrong = Vec::new();
    for page in documents() {
        let code = page.spans().into_iter().map(|span| (span.line, span.text));
        let blocks = page
            .blocks()
            .into_iter()
            .map(|block| (block.line, block.text));
        for (line, text) in code.chain(blocks) {
            for (at, _) in text.match_indices("/v1/") {
                let path: String = text[at..].chars().take_while(|c| is_part(*c)).collect();
                if !paths.contains(&path) {
                    wrong.push(format!("{}: no path {path}", page.place(line)));
                }
                if page.path.ends_with("api.md") {
                    described.insert(path);
                }
            }
        }
    }
    let missing = paths.iter().filter(is_described);
    let missing = missing.filter(|path| !described.contains(*path));
    wrong.extend(missing.map(|path| format!("docs/src/api.md lacks {path}")));
    all_right(&wrong);
}

#[test]
fn metrics_exist() {
    let is_part = |c: char| c.is_ascii_lowercase() || c == '_';
    let metrics = literals(&sources(), "riser_", is_part);
    assert!(metrics.len() >= 40, "{metrics:?}");
    let mut wrong = Vec::new();
    for page in documents() {
        for span in page.spans() {
            let crates = [
                "riser_target",
                "riser_transport",
                "riser_initiator",
                "riser_scsi",
            ];
            let is_metric = span.text.starts_with("riser_") && span.text.chars().all(is_part);
            let is_crate = crates.contains(&span.text.as_str());
            if is_metric && !is_crate && !metrics.contains(&span.text) {
                wrong.push(format!(
                    "{}: no metric {}",
                    page.place(span.line),
                    span.text
                ));
            }
        }
    }
    all_right(&wrong);
}
