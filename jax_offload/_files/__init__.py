"""The files of a state: the option ``disk=``, what is under way to and from them, and commits."""
