//! Limits the number of methods of a type. Types above the limit have a budget that can only be
//! lowered.

use std::collections::BTreeMap;
use std::fs;

use super::measures::Measures;
use super::sources::Package;
use crate::{Failure, root};

/// Budgets: the crate and module, the type, and its number of methods per line.
const BUDGETS: &str = "xtask/methods.txt";

/// Maximum number of methods of a type without a budget.
const LIMIT: usize = 80;

pub(super) fn over_budget(packages: &[Package]) -> Result<Vec<String>, Failure> {
    let mut measures = Measures::default();
    for package in packages {
        measures.add(Measures::of(package));
    }
    let text = fs::read_to_string(root().join(BUDGETS))?;
    let mut budgets = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let entry = line.rsplit_once(' ');
        let entry = entry.and_then(|(name, most)| Some((name.to_owned(), most.parse().ok()?)));
        budgets.extend([entry.ok_or_else(|| format!("{BUDGETS}: invalid line \"{line}\""))?]);
    }
    Ok(compare(&measures.methods(), &budgets))
}

fn compare(methods: &BTreeMap<String, usize>, budgets: &BTreeMap<String, usize>) -> Vec<String> {
    let mut wrong = Vec::new();
    for (name, count) in methods {
        let most = budgets.get(name).copied().unwrap_or(LIMIT);
        if *count > most {
            wrong.push(format!(
                "{name}: {count} methods exceed {most}: split the type"
            ));
        }
    }
    for (name, most) in budgets {
        match methods.get(name).copied().unwrap_or_default() {
            count if count <= LIMIT => wrong.push(format!("{BUDGETS}: remove {name}")),
            count if count < *most => wrong.push(format!("{BUDGETS}: lower {name} to {count}")),
            _ => {}
        }
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_can_only_be_lowered() {
        let of = |count: usize| BTreeMap::from([("a/b C".to_owned(), count)]);
        let none = BTreeMap::new();
        assert!(compare(&of(LIMIT), &none).is_empty());
        assert_eq!(compare(&of(LIMIT + 1), &none).len(), 1);
        assert!(compare(&of(90), &of(90)).is_empty());
        assert_eq!(compare(&of(91), &of(90)).len(), 1);
        assert_eq!(
            compare(&of(89), &of(90)),
            ["xtask/methods.txt: lower a/b C to 89"]
        );
        assert_eq!(
            compare(&of(LIMIT), &of(90)),
            ["xtask/methods.txt: remove a/b C"]
        );
        assert_eq!(compare(&none, &of(90)), ["xtask/methods.txt: remove a/b C"]);
    }
}
