//! State machine coverage of the fuzz targets.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use super::process::{TRANSITIONS, work_dir};
use super::targets::TARGETS;
use crate::{Failure, root};

/// Transitions of each state machine, as a pair of previous and next state.
type Transitions = BTreeMap<String, BTreeSet<(String, String)>>;

/// Prints how many transitions of each state machine were covered by the last run of
/// all targets, and lists the transitions that were not covered.
pub(super) fn report() -> Result<(), Failure> {
    let tables = tables(&fs::read_to_string(root().join("state/tables.txt"))?);
    let mut taken = Transitions::new();
    for target in TARGETS.iter() {
        // This file doesn't exist if the target has no state machine or has never been run.
        let lines = fs::read_to_string(work_dir(target).join(TRANSITIONS)).unwrap_or_default();
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
        let taken = taken.remove(machine).unwrap_or_default();
        let unreached: Vec<_> = all.difference(&taken).collect();
        let (reached, all) = (all.len() - unreached.len(), all.len());
        println!("{reached:>11} {all:>4}  {machine}");
        // If a state machine is not used by any target, the number is enough.
        for (from, to) in unreached.iter().filter(|_| reached > 0) {
            println!("{:>18}without {from} -> {to}", "");
        }
    }
    Ok(())
}

/// Parses the transition tables. Each table starts with the name of the state machine, followed by
/// a line for each state with all possible next states. If there are several tables for a machine,
/// their transitions are merged.
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
