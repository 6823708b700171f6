//! `cargo xtask items`: verifies that every item of the documents that Riser is based on is
//! implemented and tested, or is not present for a good reason.
//!
//! The items are listed in `xtask/cases/items.toml`. The tables in [`rows::DOCUMENTS`] have a row
//! with information about each item, which determines its class ([`rows::Class`]). We make sure
//! that the content of these rows is valid ([`check`]): any file, function or case must exist. We
//! also count the items in each class ([`summary`]).

mod check;
mod rows;
mod sources;
mod summary;

use std::collections::BTreeMap;
use std::fs;

use serde::Deserialize;

use crate::{Failure, cases, marks, root};
use check::Known;
use rows::{Class, Row};
use sources::Sources;
use summary::Counts;

/// Document with the summary section, and the markers before and after its content.
const SUMMARY: &str = "docs/seeds.md";
const MARKS: [&str; 2] = [
    "<!-- cargo xtask items: begin -->",
    "<!-- cargo xtask items: end -->",
];

/// Options of `cargo xtask items`.
///
/// Prints the number of items in each class. Returns an error if an item is not fully implemented,
/// if there isn't exactly one row about it, or if the information in this row is invalid.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// List the items in these classes, and the location of the row about each item.
    #[arg(value_enum)]
    classes: Vec<Class>,
    /// Update the summary section in docs/seeds.md.
    #[arg(long)]
    update: bool,
}

/// A part of the interfaces; `xtask/cases/items.toml` describes the fields.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct System {
    system: String,
    sections: Vec<String>,
    items: Vec<String>,
}

fn systems() -> Vec<System> {
    cases::read(include_str!("../../cases/items.toml"))
}

/// An item, and the row with information about it.
#[derive(Debug)]
struct Item<'a> {
    name: &'a str,
    system: &'a str,
    row: &'a Row,
}

pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let (systems, rows) = (systems(), rows::read()?);
    let (items, mut wrong) = assign(&systems, &rows);
    wrong.extend(check::check(&rows, &Known::new()?, &Sources::new()));
    let counts = Counts::new(&systems, &items);
    for item in &items {
        if options.classes.contains(&item.row.class()) {
            println!("{}: {} `{}`", item.row.place, item.row.class(), item.name);
        }
    }
    if options.update {
        update(&counts)?;
    }
    println!("{}", counts.table());
    for class in [Class::Missing, Class::Partial] {
        let of_class = items.iter().filter(|item| item.row.class() == class);
        wrong
            .extend(of_class.map(|item| format!("{}: `{}` is {class}", item.row.place, item.name)));
    }
    for problem in &wrong {
        println!("{problem}");
    }
    match wrong.len() {
        0 => Ok(()),
        number => Err(format!("{number} problems in the tables of items").into()),
    }
}

/// Finds the row about each item. Also returns errors: an item must be listed only once, and there
/// must be exactly one row about it.
fn assign<'a>(systems: &'a [System], rows: &'a [Row]) -> (Vec<Item<'a>>, Vec<String>) {
    let (mut items, mut wrong) = (Vec::new(), Vec::new());
    let mut listed = BTreeMap::<_, &str>::new();
    for System {
        system,
        sections,
        items: names,
    } in systems
    {
        for name in names {
            let is_row = |row: &&Row| sections.contains(&row.section) && row.names.contains(name);
            let found: Vec<_> = rows.iter().filter(is_row).collect();
            match found[..] {
                [row] => items.push(Item { name, system, row }),
                [] => wrong.push(format!("{system}: `{name}` has no row")),
                _ => {
                    let places: Vec<_> = found.iter().map(|row| row.place.as_str()).collect();
                    let places = places.join(", ");
                    wrong.push(format!("{system}: `{name}` has several rows: {places}"));
                }
            }
            // A function can be in both a draft and the current interface, in different sections.
            for section in sections {
                if let Some(other) = listed.insert((name, section), system) {
                    wrong.push(format!("`{name}` is listed in {other} and {system}"));
                }
            }
        }
    }
    (items, wrong)
}

/// Updates the summary section in the document.
fn update(counts: &Counts<'_>) -> Result<(), Failure> {
    let path = root().join(SUMMARY);
    let text = fs::read_to_string(&path)?;
    let text = marks::replaced(&text, &MARKS, &counts.table())
        .map_err(|e| format!("{}: {e}", path.display()))?;
    fs::write(path, text)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Verifies the tables in the repository. If this fails, all errors are shown at the same time.
    #[test]
    fn checked_in_tables_are_valid() {
        let (systems, rows) = (systems(), rows::read().unwrap());
        let (items, mut wrong) = assign(&systems, &rows);
        let known = Known::new().unwrap();
        wrong.extend(check::check(&rows, &known, &Sources::new()));
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
        let total: usize = systems.iter().map(|system| system.items.len()).sum();
        assert_eq!(items.len(), total);
    }

    #[test]
    fn checked_in_summary_is_current() {
        let (systems, rows) = (systems(), rows::read().unwrap());
        let (items, _) = assign(&systems, &rows);
        let text = fs::read_to_string(root().join(SUMMARY)).unwrap();
        let table = Counts::new(&systems, &items).table();
        let new = marks::replaced(&text, &MARKS, &table).unwrap();
        assert!(new == text, "run `cargo xtask items --update`");
    }

    fn system(system: &str, items: &[&str]) -> System {
        System {
            system: system.to_owned(),
            sections: vec!["Verbs".to_owned()],
            items: items.iter().map(|item| (*item).to_owned()).collect(),
        }
    }

    #[test]
    fn items_need_exactly_one_row() {
        let text = "## Verbs\n\n| name | implementation | test | judge |\n| --- | --- | --- | --- |\n\
                    | `a`, `b` | x | y | z |\n| `b` | x | y | z |\n\n## Others\n\n\
                    | name | implementation | test | judge |\n| --- | --- | --- | --- |\n\
                    | `a`, `c` | x | y | z |\n";
        let rows = rows::parse("d.md", text);
        let systems = [system("verbs", &["a", "b", "c"]), system("more", &["a"])];
        let (items, wrong) = assign(&systems, &rows);
        assert_eq!(items[0].name, "a");
        assert_eq!(items[0].row.place, "d.md:5");
        let expected = [
            "verbs: `b` has several rows: d.md:5, d.md:6",
            "verbs: `c` has no row",
            "`a` is listed in verbs and more",
        ];
        assert_eq!(wrong, expected);
    }
}
