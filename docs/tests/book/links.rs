//! Checks links, anchors and the table of contents.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use riser_docs::{BOOK, Page, book, documents, root};

use crate::all_right;

/// Resolves `..` in a path relative to the repository's root.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(normal.pop()),
            other => normal.push(other),
        }
    }
    normal
}

#[test]
fn links_lead_to_files_and_headings() {
    let pages = documents();
    let anchors: BTreeMap<_, _> = pages
        .iter()
        .map(|p| (p.path.clone(), p.anchors()))
        .collect();
    let mut wrong = Vec::new();
    for page in &pages {
        for link in page.links() {
            if link.text.contains("://") {
                continue;
            }
            let (file, anchor) = match link.text.split_once('#') {
                Some((file, anchor)) => (file, Some(anchor)),
                None => (link.text.as_str(), None),
            };
            let directory = page.path.parent().expect("a page has a directory");
            let path = match file {
                "" => page.path.clone(),
                file => normal(&directory.join(file)),
            };
            let has_anchor = |anchor: &str| anchors.get(&path).is_some_and(|a| a.contains(anchor));
            let leaves = page.path.starts_with(BOOK) && !path.starts_with(BOOK);
            let why = match anchor {
                _ if !root().join(&path).exists() => "no such file",
                // This link would be broken in the published book.
                _ if leaves => "is not in the book",
                Some(anchor) if !has_anchor(anchor) => "no such heading",
                _ => continue,
            };
            wrong.push(format!("{}: {}: {why}", page.place(link.line), link.text));
        }
    }
    all_right(&wrong);
}

/// Each alert links to the section of the book with the same name.
#[test]
fn runbook_urls_lead_to_headings() {
    const PAGE: &str = "alerts.md";
    let rules = std::fs::read_to_string(root().join("deploy/prometheus/riserd.rules.yml"));
    let rules = rules.expect("the rules can be read");
    let page = Page::read(&Path::new(BOOK).join(PAGE));
    let mut wrong = Vec::new();
    let mut headings = BTreeSet::new();
    for rule in rules.split("- alert: ").skip(1) {
        let name = rule.lines().next().unwrap_or_default();
        let heading = name.to_lowercase();
        let url = format!("file:///usr/share/doc/riser/book/src/{PAGE}#{heading}");
        if !rule.contains(&format!("runbook_url: \"{url}\"\n")) {
            wrong.push(format!("{name}: its runbook_url is not {url}"));
        }
        if !page.anchors().contains(&heading) {
            wrong.push(format!("{name}: {PAGE} has no such heading"));
        }
        headings.insert(format!("## {name}"));
    }
    let others = page.text().lines().filter(|line| line.starts_with("## "));
    let others = others.filter(|line| !headings.contains(*line));
    wrong.extend(others.map(|line| format!("{PAGE}: {line} is no alert")));
    all_right(&wrong);
}

#[test]
fn summary_lists_pages_once() {
    let summary = Page::read(&Path::new(BOOK).join("SUMMARY.md"));
    let listed: Vec<_> = summary.links().into_iter().map(|link| link.text).collect();
    let pages = book().into_iter().map(|page| page.path);
    let pages: BTreeSet<_> = pages
        .map(|path| {
            path.strip_prefix(BOOK)
                .expect("it is in the book")
                .to_owned()
        })
        .filter(|path| path != Path::new("SUMMARY.md"))
        .collect();
    let known: BTreeSet<_> = listed.iter().map(PathBuf::from).collect();
    assert_eq!(known, pages);
    assert_eq!(known.len(), listed.len(), "a page is listed twice");
}

#[test]
fn pages_begin_with_their_only_title() {
    let pages = book();
    let wrong = pages.iter().filter(|page| {
        let is_title = |line: &&str| line.starts_with("# ");
        let mut fence = false;
        let lines = page.text().lines().filter(|line| {
            fence ^= line.starts_with("```");
            !fence
        });
        let is_summary = page.path.ends_with("SUMMARY.md");
        let titles = lines.filter(is_title).count();
        !page.text().starts_with("# ") || (titles != 1 && !is_summary)
    });
    let wrong: Vec<_> = wrong.map(|page| page.place(1)).collect();
    all_right(&wrong);
}
