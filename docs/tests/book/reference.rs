//! Checks the page with all configuration keys, which is generated from the schema.

use std::fmt::Write as _;
use std::fs;

use riser_docs::{BOOK, root};
use riser_target::cli::reference::{Key, Object, objects};
use riser_target::config::schema;

/// Path of the page in the book's directory.
const PAGE: &str = "reference.md";

const HEAD: &str = "\
# Keys of the configuration

This page is generated from the schema printed by `riserd schema`; riserd.yaml(5) has the same contents.
No other keys are allowed. `NAME` is a name or number of your choice, `[]` an item of a list. Sizes have a
suffix `KiB` to `TiB` (powers of 1024) or `KB` to `TB` (powers of 1000); times have `ms`, `s`, `m` or `h`,
or are numbers of seconds.
[Configure](configure.md) has examples.
";

fn page() -> String {
    let mut page = HEAD.to_owned();
    for object in objects(&schema()) {
        add(&mut page, &object);
    }
    page
}

fn add(page: &mut String, object: &Object) {
    let title = match object.places[0].as_str() {
        "" => "The file".to_owned(),
        place => format!("`{place}`"),
    };
    writeln!(page, "\n## {title}").expect("text grows");
    let others = object.places[1..].iter().map(|place| format!("`{place}`"));
    let others: Vec<_> = others.collect();
    if !others.is_empty() {
        writeln!(page, "\nLikewise {}.", others.join(", ")).expect("text grows");
    }
    for paragraph in &object.text {
        writeln!(page, "\n{}", escaped(paragraph)).expect("text grows");
    }
    page.push('\n');
    for key in &object.keys {
        add_key(page, key);
    }
}

fn add_key(page: &mut String, key: &Key) {
    let (first, more) = key.text.split_first().expect("every key is described");
    let (name, summary) = (&key.name, key.summary());
    writeln!(page, "- **`{name}`** ({summary}): {}", escaped(first)).expect("text grows");
    for paragraph in more {
        writeln!(page, "\n  {}", escaped(paragraph)).expect("text grows");
    }
    for (value, about) in key.choices.iter().filter(|(_, about)| !about.is_empty()) {
        writeln!(page, "  - `{value}`: {}", escaped(about)).expect("text grows");
    }
}

/// Escapes text for Markdown, so that it doesn't contain any tags.
fn escaped(text: &str) -> String {
    text.replace('<', "\\<")
}

#[test]
fn reference_is_up_to_date() {
    let (file, page) = (root().join(BOOK).join(PAGE), page());
    if std::env::var_os("UPDATE").is_some() {
        fs::write(&file, page).expect("the page can be written");
        return;
    }
    let is_same = fs::read_to_string(&file).is_ok_and(|text| text == page);
    assert!(
        is_same,
        "{PAGE} is not that of the schema: UPDATE=1 cargo test -p riser-docs makes it again"
    );
}
