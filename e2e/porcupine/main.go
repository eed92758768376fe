// The program history-checker reads a history of one node's CNI calls and says whether it is linearizable: whether
// the calls can be ordered so that each takes effect at one moment between its start and its end, and all answers are
// those of a correct ledger.
//
// Input: one JSON object per line, see [call]. Exit codes: 0 linearizable; 1 not, with the calls that cannot be ordered
// on standard output; 2 not decided in the time given, or wrong input. The first argument, if any, is a path at which
// the first part of the history that is not linearizable is drawn as a web page.
package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"math"
	"os"
	"slices"
	"sort"
	"time"

	"github.com/anishathalye/porcupine"
)

// The time limit for each of the two models.
const limit = 2 * time.Minute

// A call of the CNI plugin.
type call struct {
	// "add", "check" or "del"
	Verb string `json:"verb"`
	// The container's id
	Container string `json:"container"`
	// The address that an ADD returned, or that a CHECK was asked about
	Address string `json:"address"`
	// "ok"; "refused": the answer is that the call changed nothing; "unknown": the call may have taken effect, or may
	// do so after its end
	Outcome string `json:"outcome"`
	// Nanoseconds on one clock. If the outcome is unknown, the end does not matter.
	Start int64 `json:"start"`
	End   int64 `json:"end"`
	// The caller. No two calls of one caller overlap.
	Caller int `json:"caller"`
}

func read(from io.Reader) ([]call, error) {
	var calls []call
	lines := bufio.NewScanner(from)
	for lines.Scan() {
		var it call
		if err := json.Unmarshal(lines.Bytes(), &it); err != nil {
			return nil, fmt.Errorf("call %d: %w", len(calls)+1, err)
		}
		if !slices.Contains([]string{"add", "check", "del"}, it.Verb) ||
			!slices.Contains([]string{"ok", "refused", "unknown"}, it.Outcome) {
			return nil, fmt.Errorf("call %d: unknown verb or outcome: %+v", len(calls)+1, it)
		}
		calls = append(calls, it)
	}
	if len(calls) == 0 {
		return nil, errors.New("there are no calls")
	}
	return calls, lines.Err()
}

// Creates the operations that porcupine checks. A call whose outcome is unknown takes effect, if at all, before a later
// DEL of its container has succeeded: such a DEL is the last word on a container. Without one, the call ends after all
// others.
func operations(calls []call) []porcupine.Operation {
	var last int64
	for _, it := range calls {
		last = max(last, it.End)
	}
	var all []porcupine.Operation
	for _, it := range calls {
		end := it.End
		if it.Outcome == "unknown" {
			end = last + 1
			for _, later := range calls {
				if later.Verb == "del" && later.Outcome == "ok" && later.Container == it.Container && later.Start > it.Start {
					end = min(end, later.End)
				}
			}
		}
		all = append(all, porcupine.Operation{ClientId: it.Caller, Input: it, Call: it.Start, Output: it.Outcome, Return: end})
	}
	return all
}

// Groups calls by a key, in the order of the keys. Calls without a key are left out.
func grouped(calls []call, keys func(call) []string) [][]call {
	groups := map[string][]call{}
	for _, it := range calls {
		for _, key := range keys(it) {
			groups[key] = append(groups[key], it)
		}
	}
	var names []string
	for name := range groups {
		names = append(names, name)
	}
	sort.Strings(names)
	var all [][]call
	for _, name := range names {
		all = append(all, groups[name])
	}
	return all
}

// The calls that concern each address. An ADD without a known result, and a DEL, concern every address that the
// container had at any time.
func byAddress(calls []call) [][]call {
	had := map[string][]string{}
	for _, it := range calls {
		if it.Verb == "add" && it.Outcome == "ok" && !slices.Contains(had[it.Container], it.Address) {
			had[it.Container] = append(had[it.Container], it.Address)
		}
	}
	return grouped(calls, func(it call) []string {
		switch {
		case it.Verb == "check", it.Verb == "add" && it.Outcome == "ok":
			return []string{it.Address}
		default:
			return had[it.Container]
		}
	})
}

func byContainer(calls []call) [][]call {
	return grouped(calls, func(it call) []string { return []string{it.Container} })
}

// The state of an address is the container that has it, or free.
const free = ""

func addressStep(holder string, it call) []string {
	mine := holder == it.Container
	after := holder
	switch it.Verb {
	case "add":
		if holder == free {
			after = it.Container
		}
		// Only the container that has the address, or gets it, is told so.
		if it.Outcome == "ok" && after != it.Container {
			return nil
		}
	case "del":
		if mine {
			after = free
		}
	case "check":
		if (it.Outcome == "ok") != mine && it.Outcome != "unknown" {
			return nil
		}
	}
	return outcomes(holder, after, it)
}

// The state of a container is its address, none, or some: an address that nobody was told.
const (
	none = ""
	some = "?"
)

func containerStep(address string, it call) []string {
	after := address
	switch it.Verb {
	case "add":
		switch {
		case it.Outcome != "ok":
			if address == none {
				after = some
			}
		// A repeated ADD returns the same address.
		case address == none, address == some, address == it.Address:
			after = it.Address
		default:
			return nil
		}
	case "del":
		after = none
	case "check":
		switch it.Outcome {
		case "ok":
			if address != it.Address && address != some {
				return nil
			}
			after = it.Address
		case "refused":
			if address == it.Address {
				return nil
			}
		}
	}
	return outcomes(address, after, it)
}

// Returns the states that can follow a call: what it does if it takes effect, and what was before if it may not.
func outcomes(before, after string, it call) []string {
	switch {
	case it.Outcome == "ok":
		return []string{after}
	case it.Outcome == "refused":
		return []string{before}
	default:
		return []string{before, after}
	}
}

func model(step func(string, call) []string) porcupine.Model {
	nondeterministic := porcupine.NondeterministicModel{
		Init: func() []any { return []any{""} },
		Step: func(state, input, _ any) []any {
			var all []any
			for _, it := range step(state.(string), input.(call)) {
				all = append(all, it)
			}
			return all
		},
		Hash: func(state any) uint64 {
			hash := fnv.New64a()
			hash.Write([]byte(state.(string)))
			return hash.Sum64()
		},
		DescribeOperation: func(input, _ any) string { return describe(input.(call)) },
	}
	return nondeterministic.ToModel()
}

func describe(it call) string {
	return fmt.Sprintf("%s %s %s: %s", it.Verb, it.Container, it.Address, it.Outcome)
}

// Returns the calls of a group that lead to the first one for which no order has a place, at most a dozen.
func leadingTo(calls []call, info porcupine.LinearizationInfo) []call {
	var longest []porcupine.Operation
	for _, it := range info.PartialLinearizationsOperations()[0] {
		if len(it) > len(longest) {
			longest = it
		}
	}
	placed := map[call]bool{}
	for _, it := range longest {
		placed[it.Input.(call)] = true
	}
	first := int64(math.MaxInt64)
	for _, it := range calls {
		if !placed[it] && it.Outcome != "unknown" {
			first = min(first, it.End)
		}
	}
	var all []call
	for _, it := range calls {
		if it.Start <= first {
			all = append(all, it)
		}
	}
	slices.SortFunc(all, func(a, b call) int { return cmp.Compare(a.Start, b.Start) })
	return all[max(0, len(all)-12):]
}

// Checks each group. Prints the first group that cannot be ordered.
func check(name string, groups [][]call, step func(string, call) []string, picture string) int {
	model, start := model(step), time.Now()
	for _, calls := range groups {
		result, info := porcupine.CheckOperationsVerbose(model, operations(calls), limit-time.Since(start))
		switch result {
		case porcupine.Ok:
			continue
		case porcupine.Unknown:
			fmt.Printf("%s: not decided after %v\n", name, limit)
			return 2
		}
		around := leadingTo(calls, info)
		fmt.Printf("%s: these calls, the last of %d, cannot be ordered:\n", name, len(calls))
		for _, it := range around {
			fmt.Printf("%10.3f ms to %10.3f ms  caller %d: %s\n",
				float64(it.Start)/1e6, float64(it.End)/1e6, it.Caller, describe(it))
		}
		if picture != "" {
			if err := porcupine.VisualizePath(model, info, picture); err != nil {
				fmt.Println(err)
			}
		}
		return 1
	}
	fmt.Printf("%s: %d, linearizable\n", name, len(groups))
	return 0
}

func main() {
	calls, err := read(os.Stdin)
	if err != nil {
		fmt.Println(err)
		os.Exit(2)
	}
	picture := ""
	if len(os.Args) > 1 {
		picture = os.Args[1]
	}
	containers := check("containers", byContainer(calls), containerStep, picture)
	addresses := check("addresses", byAddress(calls), addressStep, picture)
	if containers == 1 {
		os.Exit(1)
	}
	os.Exit(addresses)
}
