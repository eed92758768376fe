//! Checks of the rules, with the true time and the server's own history.

use std::collections::BTreeMap;

use cadastre_controller::cluster::lease::{Mono, Takeover, Tenure};

use crate::server::{Origin, Server, Time};

/// A process that leads under a term, and until when in true time.
struct Claim {
    process: usize,
    term: String,
    until: Time,
    /// Whether it began in the one way that no candidate can detect, see [`Checks::is_blind`].
    blind: bool,
}

/// What is known of the process that leads.
pub struct Claimant<'a> {
    pub process: usize,
    pub holder: &'a str,
    /// Whether this process was ever shown that a Lease exists.
    pub has_seen: bool,
    /// Start of its last write that took effect while it held the Lease, by its own clock.
    pub last_effect: Mono,
    pub last_effect_asked: Time,
}

#[derive(Default)]
pub struct Checks {
    claims: Vec<Claim>,
    /// Every term so far, with its holder and whether it is over.
    terms: BTreeMap<String, (String, bool)>,
    pub blind: u64,
    pub resumed: u64,
    pub takeovers: [u64; 3],
}

impl Checks {
    /// Checks a process that leads until `until` in true time.
    pub fn leads(
        &mut self,
        who: &Claimant,
        tenure: &Tenure,
        deadline: Mono,
        until: Time,
        server: &Server,
        now: Time,
    ) {
        let bound = who.last_effect + deadline;
        assert!(
            tenure.valid_until <= bound,
            "{} may write until {:?}, but its last renewal allows {bound:?}",
            who.holder,
            tenure.valid_until
        );
        let term = tenure.term.to_string();
        let known = self
            .claims
            .iter()
            .position(|claim| claim.process == who.process);
        if known.is_some_and(|i| self.claims[i].term != term) {
            self.leads_no_more(who.process);
        }
        let index = match self
            .claims
            .iter()
            .position(|claim| claim.process == who.process)
        {
            Some(index) => index,
            None => self.begin(who, tenure, &term, server),
        };
        let claim = &mut self.claims[index];
        if claim.until <= now && until > now && claim.until > 0 {
            self.resumed += 1;
        }
        claim.until = until;
        let (blind, until) = (claim.blind, claim.until);
        for other in &self.claims {
            let both = other.process != who.process && other.until > now && until > now;
            assert!(
                !both || blind || other.blind,
                "{term} and {} lead at once",
                other.term
            );
        }
    }

    fn begin(&mut self, who: &Claimant, tenure: &Tenure, term: &str, server: &Server) -> usize {
        let before = self
            .terms
            .insert(term.to_owned(), (who.holder.to_owned(), false));
        assert!(before.is_none(), "the term {term} comes twice: {before:?}");
        let transitions = term.split_once('-').unwrap().0.parse().unwrap();
        let origin = server
            .reigns
            .get(&(who.holder.to_owned(), transitions))
            .copied();
        let origin = origin.unwrap_or_else(|| panic!("{term} leads, but never held the Lease"));
        let expected = match origin.takeover {
            Takeover::First if server.deleted.is_some_and(|at| at < origin.at) && who.has_seen => {
                Takeover::Unclean
            }
            other => other,
        };
        // A process that saw the Lease and still created a new one must not call that a first start. Calling a start
        // unclean that was not only costs a fence.
        let cautious = origin.created && tenure.takeover == Takeover::Unclean;
        assert!(
            tenure.takeover == expected || cautious,
            "{term} calls its beginning {:?}, it was {expected:?}",
            tenure.takeover
        );
        self.takeovers[tenure.takeover as usize] += 1;
        let blind = Self::is_blind(who, origin, server);
        self.blind += u64::from(blind);
        self.claims.push(Claim {
            process: who.process,
            term: term.to_owned(),
            until: 0,
            blind,
        });
        self.claims.len() - 1
    }

    /// If a Lease is deleted under its holder, a process that never saw it, or whose write was in flight, cannot
    /// know. Only this is excused.
    fn is_blind(who: &Claimant, origin: Origin, server: &Server) -> bool {
        let Some(deleted) = server.deleted else {
            return false;
        };
        origin.created && origin.at > deleted && (!who.has_seen || who.last_effect_asked < deleted)
    }

    /// Ends the claim of a process that no longer leads, or that has ended.
    pub fn leads_no_more(&mut self, process: usize) {
        for claim in self.claims.extract_if(.., |claim| claim.process == process) {
            self.terms
                .entry(claim.term)
                .and_modify(|(_, over)| *over = true);
        }
    }

    /// Returns the processes that may write now, with their terms.
    pub fn leaders(&self, now: Time) -> Vec<(usize, &str)> {
        let valid = self.claims.iter().filter(|claim| claim.until > now);
        valid.map(|claim| (claim.process, &*claim.term)).collect()
    }
}
