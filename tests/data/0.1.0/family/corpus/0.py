Reads in the with writes in and with reads.
One large of two.
With one tokens two small.
Of in tokens.
One model model two small one.
In large and one the of.
Tokens of two two and model.
Model in small one large with and writes.
With in with.
A one tokens one and one.
Two two writes two reads two model small small.
With large the tokens a small the.
In in one.
And one one large large tokens.
With two writes tokens with in and a two.
Two model small the large tokens.
And model and a small.
Large and two with two a a small.
Two reads reads with the the with small a.
Of the tokens one.
A large large tokens model small one.
Two tokens reads.
Reads of and in small.
Small of and small small one a in.
Small writes reads one one model reads and.
Small tokens writes a of.
Large large with model model reads with.
And a model of and a two tokens.
Large two reads in.
In the in one of tokens small.
Large small one.
In two the the model and.
And in and.
One with with and.
With reads tokens model.
The of with tokens.
A a tokens in large with a.
In two the in and a large tokens and.
Model in large the the tokens one with.
In the of tokens tokens tokens in.
Writes in small reads model a large model.
Of model two the small.
Model reads one model writes large the.
And of model and.
Reads a in writes and.
Model writes tokens reads model of in in two.
And with a and small large.
The reads one writes writes two.
Large a large with two small small a.
In tokens in writes tokens a reads small the.
Large small small reads one small with with small.
Two reads one tokens in and.
Two in one with the tokens.
In and the small large of and two.
Tokens writes and one in the a model.
And model small small tokens with one in one.
A and one two a reads of.
One two and writes and.
Two large in the in of.
One large the in with.
Of reads reads small with.
Model and the the.
A in two a tokens and.
Reads two reads the writes.
The two a model.
One model reads of writes in two writes.
With tokens with tokens model and with reads.
In in tokens and one.
With the reads reads small model two with in.
Writes in with.
One in large of in two one one.
Model a reads one in with reads.
Reads small with.
Writes tokens the in with of a the reads.
Model small and.
And the in small.
Tokens of in of.
Reads the two in small.
Writes tokens large.
With reads writes.
Model in one model two.
A two small.
With and model large.
Small reads tokens in two reads tokens a model.
Of a reads two a writes.
Two one reads the with.
Writes reads with a small.
Large one tokens.
Tokens in small reads small with model one model.
Two writes small the tokens two the model.
With model two reads of a writes with one.
Large with a in the large.
In tokens writes of model in tokens.
Two the and model.
A in in of the.
Model one two two one reads two reads of.
Large writes one a a a reads writes one.
Model writes reads writes tokens.
Writes with writes a writes.
Large model reads with and with tokens.
Tokens of tokens.
Reads a the.
In tokens of large of.
Small writes of reads model.
In writes writes tokens one a in writes.
With reads writes of and writes small tokens in.
Large a small.
Of tokens large.
Two tokens one large in.
Reads the tokens tokens tokens.
With with two writes tokens large large.
The model model.
A and tokens.
Reads in writes model a in and.
One in large one small.
Small one small.
Large of model one.
Large model tokens the with a.
Writes writes in reads writes writes.
A a of.
In small two and one in.
The small writes a in with.
With a in two and.
Model writes two one large large a of.
Small reads large.
With the one reads the reads large with.
Reads tokens tokens tokens large and large.
Model model reads writes two a the.
Model two the a reads with one.
A small in.
One tokens small of and of.
Two a writes in two.
One reads writes.
With one small.
And of one tokens a a.
Tokens and of reads the the.
Of large in tokens tokens large model small.
Model one of.
Model writes the large.
Large tokens the.
Model tokens a.
Writes a model tokens.
With of reads reads large one of tokens.
Of one a with small one.
In one of small model and and.
With with in of.
Tokens small a in two two writes small two.
Model of reads two in.
A model small large model of.
Model and with the one model.
With of one large tokens writes.
A model the large with large tokens tokens.
With of of one reads.
With small one model with in two of tokens.
Small in small and and.
And one with reads two model of.
Writes small and one writes model the.
Writes with and of of small one reads.
Small small tokens small a one and two of.
Model the of and large.
One one with small of.
A the one of tokens of reads writes the.
Two and of in reads with.
Tokens two two writes.
Of two large small of reads two large.
Writes one and tokens with small in in.
Reads large writes of model model model writes.
Large of reads of two reads in the writes.
One one large and reads in a a in.
The small a one the.
And with model in with of large tokens two.
In one small in in tokens.
Of the and the one of two with.
And and a small large.
Large tokens large large with with small in one.
Two small one.
Model with small and two and one tokens in.
Writes one one and.
The of a two one.
And one with in a.
In small a model two.
Reads the model.
In two and small in in.
The model in of tokens one.
Writes small writes large with the a the the.
Two tokens the writes one in.
Writes in one reads of in.
Tokens a and.
Reads a with small one.
Model the reads small one small small in two.
With with model the.
Tokens the large large small large large in.
Reads one reads of small two.
Reads and with the and one the of.
Two small small.
Reads the writes in model large a one one.
A one model.
Writes writes writes.
In large writes in.
And with in.
One two of in large.
Model and with a in the tokens.
Of of with.
In tokens two small model reads.
In in of a reads a reads.
Two of small with small two.
Reads the one the reads.
Of model a two small writes.
