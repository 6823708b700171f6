//! What fuzz targets have reached of the state machines.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use super::process::{Figures, TRANSITIONS, work};
use crate::{Failure, root};

/// Transitions by machine: the states before and after.
type Transitions = BTreeMap<String, BTreeSet<(String, String)>>;

/// Prints how many transitions of each machine all targets together have taken, of those that its
/// table has.
pub(super) fn report(figures: &[Figures]) -> Result<(), Failure> {
    let tables = tables(&fs::read_to_string(root().join("state/tables.txt"))?);
    let mut taken = Transitions::new();
    for figures in figures {
        // There is none of a target without a machine.
        let lines = fs::read_to_string(work(&figures.target).join(TRANSITIONS)).unwrap_or_default();
        for line in lines.lines() {
            let words: Vec<_> = line.split(' ').collect();
            if let [machine, from, to] = words[..] {
                let machine = taken.entry(machine.to_owned()).or_default();
                machine.insert((from.to_owned(), to.to_owned()));
            }
        }
    }
    println!("\n{:>11} {:>4}  machine", "transitions", "of");
    for (machine, all) in &tables {
        let taken = taken.get(machine).map_or(0, BTreeSet::len);
        println!("{taken:>11} {:>4}  {machine}", all.len());
    }
    Ok(())
}

/// Reads the tables: a machine, and below it a line for each state with those that may follow it.
/// A machine that has several may take the transitions of all.
fn tables(text: &str) -> Transitions {
    let mut all = Transitions::new();
    let mut machine = String::new();
    for line in text.lines() {
        match line
            .trim()
            .split_once(':')
            .filter(|_| line.starts_with(' '))
        {
            Some((from, next)) => {
                let pairs = next
                    .split_whitespace()
                    .map(|to| (from.to_owned(), to.to_owned()));
                all.entry(machine.clone()).or_default().extend(pairs);
            }
            None => line.clone_into(&mut machine),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_of_one_machine_are_one() {
        let all = tables("a::Of\n  A: A B\n  B:\na::Of\n  A: B\n  B: A\n");
        assert_eq!(all["a::Of"].len(), 3);
        let text = fs::read_to_string(root().join("state/tables.txt")).unwrap();
        assert!(tables(&text).len() > 15);
    }
}
