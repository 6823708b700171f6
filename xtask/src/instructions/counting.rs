//! What counting a command adds to a read, in instructions.
//!
//! The read goes over a wire in memory, so that it takes the same steps in every run.

use std::path::Path;

use crate::{Failure, sh};

/// Subject that is run, the function that is looked at, and two numbers of commands.
const READS: (&str, &str, [u64; 2]) = ("reads", "*Worker*step*", [500, 1500]);
const COUNTING: (&str, &str, [u64; 2]) = ("counting", "*commands*count_one*", [1000, 11_000]);

/// Most that counting a command may add to it, in percent. A command in a deep queue shares the
/// rounds of the worker's loop with others, so its own part is smaller, and this share larger.
const LIMIT: f64 = 2.0;

/// Measures and prints the costs, and the share of counting; fails where that is above the limit.
pub(super) fn run() -> Result<(), Failure> {
    let args = ["bench", "-q", "-p", "riser-target", "--bench", "commands"];
    let program = sh::built(&args, "commands")?;
    let read = each(&program, READS)?;
    let counting = each(&program, COUNTING)?;
    println!(
        "a read of 4 KiB over SRP on `roce`, backend in memory: {read:.0} instructions of the worker"
    );
    let share = 100.0 * counting / read;
    println!("counting it, with its times by stage: {counting:.0} instructions, {share:.2} %");
    within_limit(share)
}

fn within_limit(share: f64) -> Result<(), Failure> {
    // What is not there costs nothing, which is not what was to be measured.
    if share > 0.0 && share <= LIMIT {
        return Ok(());
    }
    Err(format!("counting takes {share:.2} %, and may take {LIMIT} %").into())
}

/// Instructions for each command: of many, less those of few.
fn each(
    program: &Path,
    (subject, function, [few, many]): (&str, &str, [u64; 2]),
) -> Result<f64, Failure> {
    // Two runs, and their difference: the start, the login and all that is made once cost the same
    // in both.
    let few_cost = collected(program, subject, function, few)?;
    let many_cost = collected(program, subject, function, many)?;
    let cost = many_cost.checked_sub(few_cost);
    let cost = cost.ok_or("more commands cost less")?;
    // A pattern that no function matches collects nothing, in both runs: a cost of zero would look
    // like a result.
    if few_cost == 0 {
        return Err(format!("{function} is not in {}", program.display()).into());
    }
    Ok(cost as f64 / (many - few) as f64)
}

/// Instructions of a function, with what it calls, while a program runs `n` commands; without those
/// of the wire in memory, which asks both its ends all the time whether they have something to
/// send.
fn collected(program: &Path, subject: &str, function: &str, n: u64) -> Result<u64, Failure> {
    let scratch = sh::Scratch::new("instructions")?;
    let file = scratch.join("callgrind.out");
    let options = [
        "--tool=callgrind".to_owned(),
        "--collect-atstart=no".to_owned(),
        // Otherwise the thread that steps the worker may never let another one log in.
        "--fair-sched=yes".to_owned(),
        format!("--callgrind-out-file={}", file.display()),
        format!("--toggle-collect={function}"),
    ];
    let mut command = sh::cmd("valgrind", &options);
    command.arg(program).args([subject, &n.to_string()]);
    sh::output(&mut command)?;
    let mut annotate = sh::cmd("callgrind_annotate", ["--auto=no", "--threshold=100"]);
    let table = sh::output(annotate.arg(&file))?;
    Ok(table.lines().filter_map(own).sum())
}

/// The instructions in a line of the table, if it is of a function that counts.
fn own(line: &str) -> Option<u64> {
    let (number, rest) = line.trim_start().split_once(" (")?;
    let (_, function) = rest.split_once("%)  ")?;
    let counts = function.contains(':') && !function.contains("riser_transport::loopback::");
    // Totals have no colon, and functions have their file before it.
    counts.then(|| number.replace(',', "").parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_beyond_the_limit_is_a_failure() {
        assert!(within_limit(0.9).is_ok());
        for share in [0.0, 2.1, f64::NAN] {
            assert!(within_limit(share).is_err(), "{share}");
        }
    }

    #[test]
    fn lines_of_the_table_are_distinguished() {
        assert_eq!(own("169,169,210 (100.0%)  PROGRAM TOTALS"), None);
        assert_eq!(own("  1,234 ( 0.10%)  src/a.rs:a::b [/x]"), Some(1234));
        let wire = "9 ( 0.10%)  src/option.rs:<riser_transport::loopback::Endpoint as P>::progress";
        assert_eq!(own(wire), None);
        assert_eq!(own("Ir                   file:function"), None);
    }
}
