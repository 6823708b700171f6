//! Number of items in each class.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::rows::Class;
use super::{Item, System};

/// Number of items for each system, in the same order as the initial list.
pub(super) struct Counts<'a>(Vec<(&'a str, BTreeMap<Class, usize>)>);

impl<'a> Counts<'a> {
    pub(super) fn new(systems: &'a [System], items: &[Item<'_>]) -> Self {
        let count = |system: &'a System| {
            let mut counts = BTreeMap::new();
            for item in items.iter().filter(|item| item.system == system.system) {
                *counts.entry(item.row.class()).or_default() += 1;
            }
            (system.system.as_str(), counts)
        };
        Self(systems.iter().map(count).collect())
    }

    /// Formats the table.
    pub(super) fn table(&self) -> String {
        let classes = Class::ALL.map(|class| class.to_string()).join(" | ");
        let mut out = format!(
            "| system | items | {classes} |\n| --- |{}\n",
            " --- |".repeat(6)
        );
        let mut total = BTreeMap::new();
        for (system, counts) in &self.0 {
            line(&mut out, system, counts);
            for (class, number) in counts {
                *total.entry(*class).or_default() += number;
            }
        }
        line(&mut out, "all", &total);
        out
    }
}

fn line(out: &mut String, name: &str, counts: &BTreeMap<Class, usize>) {
    let _ = write!(out, "| {name} | {} |", counts.values().sum::<usize>());
    for class in Class::ALL {
        let _ = write!(out, " {} |", counts.get(&class).unwrap_or(&0));
    }
    out.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::items::rows;

    #[test]
    fn table_counts_items_by_system() {
        let text = "## S\n\n| name | implementation | test | judge |\n| --- | --- | --- | --- |\n\
                    | `a`, `b` | x | `t()` | `case` |\n| `c` | no | because | |\n";
        let rows = rows::parse("d.md", text);
        let system = |name: &str, items: &[&str]| System {
            system: name.to_owned(),
            sections: vec!["S".to_owned()],
            items: items.iter().map(|item| (*item).to_owned()).collect(),
        };
        let systems = [system("one", &["a", "b"]), system("two", &["c"])];
        let (items, _) = crate::items::assign(&systems, &rows);
        let expected = "| system | items | foreign | own | partial | missing | different |\n\
                        | --- | --- | --- | --- | --- | --- | --- |\n\
                        | one | 2 | 2 | 0 | 0 | 0 | 0 |\n| two | 1 | 0 | 0 | 0 | 0 | 1 |\n\
                        | all | 3 | 2 | 0 | 0 | 0 | 1 |\n";
        assert_eq!(Counts::new(&systems, &items).table(), expected);
    }
}
